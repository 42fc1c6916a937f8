"""What is planned is what happens: bytes to the byte, rows as the kernels load them, figures by hand."""

import dataclasses
import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import kvjax_models
from kvjax import memory

HALF = kvjax.HeadPattern.of([[0.1, 0.9]] * 2)
POLICIES = {
    "full": kvjax.Full(),
    "streaming_llm": kvjax.StreamingLLM(budget=24),
    "streaming_llm_fraction": kvjax.StreamingLLM(budget=0.5),
    "h2o": kvjax.H2O(budget=24),
    "h2o_fraction": kvjax.H2O(budget=0.5),
    "h2o_pyramid": kvjax.H2O(budget=24, allocation=kvjax.Pyramid()),
    "tova": kvjax.TOVA(budget=24),
    "snapkv": kvjax.SnapKV(budget=24, window=8),
    "snapkv_evicting": kvjax.SnapKV(budget=24, window=8, evict="decode"),
    "pyramidkv": kvjax.PyramidKV(budget=0.5, window=4),
    "ada_kv": kvjax.AdaKV(budget=24, window=8),
    "ada_pyramidkv": kvjax.AdaKV(budget=0.5, window=4, allocation=kvjax.Adaptive(layers=kvjax.Pyramid())),
    "knorm": kvjax.Knorm(budget=24),
    "expected_attention": kvjax.ExpectedAttention(budget=24),
    "duo": kvjax.DuoAttention(pattern=HALF, sinks=4, recent=12),
}
ROOM = 9


@pytest.fixture(scope="module")
def small(tiny: kvjax_models.Llama) -> kvjax_models.Llama:
    """The tiny model with two layers, of random weights."""
    config = dataclasses.replace(tiny.config, num_hidden_layers=2)
    return kvjax_models.Llama(config, rngs=nnx.Rngs(0))


# Compiling takes most of the time, and speed is not what is tested.
quickly = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def prompt(*lengths: int) -> list[np.ndarray]:
    return [np.arange(length) % 500 for length in lengths]


# In a batch of unequal rows, and of a length that is padded.
@pytest.mark.parametrize("lengths", [(100, 37, 61), (67,)], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_a_states_bytes_are_known_before_there_is_one(small, name, lengths):
    dtype = "bfloat16" if len(lengths) == 1 else "float32"

    def prefill():
        return kvjax.prefill(small, prompt(*lengths), policy=POLICIES[name], max_new_tokens=ROOM, cache_dtype=dtype)[1]

    arrays = jax.tree.leaves(jax.eval_shape(prefill))
    expected = memory.state_bytes(POLICIES[name], small.spec, lengths, max_new_tokens=ROOM, dtype=dtype)
    assert expected == sum(x.size * x.dtype.itemsize for x in arrays)


# One of each way to hold tokens: appended, a ring beside appended, evicted, shared by the heads.
@pytest.mark.parametrize("name", ["duo", "h2o_fraction", "ada_pyramidkv"])
def test_what_is_counted_and_held_is_what_there_is(small, name):
    policy, length = POLICIES[name], 67

    @quickly
    def run():
        caches = [kvjax.prefill(small, prompt(length), policy=policy, max_new_tokens=ROOM)[1]]
        for _ in range(2):
            caches.append(kvjax.decode(small, caches[-1], [7], donate=False)[1])
        return caches

    for answered, cache in enumerate(run()):
        assert memory.state_bytes(policy, small.spec, [length], max_new_tokens=ROOM) == kvjax.cache_bytes(cache)
        held = memory.held_tokens(policy, small.spec, length, answered=answered, max_new_tokens=ROOM)
        for tokens, state in zip(held, cache.layers, strict=True):
            # Heads that share slots hold these in the mean.
            equal = [state.lengths.mean()] * 2 if name == "ada_pyramidkv" else np.sort(state.lengths[0])
            assert np.array_equal(np.sort(tokens), equal)


def test_caches_of_prompts_that_went_in_one_after_another_can_be_joined(small):
    @quickly
    def run():
        rows = prompt(50, 60)
        settings = {"policy": POLICIES["snapkv"], "max_new_tokens": ROOM}
        one, other, together = (kvjax.prefill(small, x, **settings)[1] for x in (rows[0], rows[1], rows))
        return jax.tree.map(lambda *x: jnp.concatenate(x), one, other), together

    joined, together = run()
    assert kvjax.cache_bytes(joined) == kvjax.cache_bytes(together)
    for got, expected in zip(kvjax.kept_positions(joined), kvjax.kept_positions(together), strict=True):
        np.testing.assert_array_equal(got, expected)


# Parameters, as they are published with the checkpoints.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
}


def test_known_models_have_as_many_parameters_as_is_published():
    sizes = {name: kvjax_models.model_size(config, "bfloat16") for name, config in kvjax_models.KNOWN_MODELS.items()}
    assert {name: size.weight_bytes // 2 for name, size in sizes.items()} == PUBLISHED


@pytest.mark.parametrize("tied", [False, True])
def test_a_models_size_is_that_of_its_arrays(tiny, tied):
    config = dataclasses.replace(tiny.config, tie_word_embeddings=tied, attention_bias=tied, mlp_bias=not tied)
    model = nnx.eval_shape(lambda: kvjax_models.Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    size = kvjax_models.model_size(config, "bfloat16")
    assert size.weight_bytes == 2 * sum(x.size for x in jax.tree.leaves(model))
    assert size.weight_bytes - size.step_bytes == (0 if tied else 2 * config.vocab_size * config.hidden_size)
    assert kvjax_models.model_spec(config, jnp.bfloat16) == model.spec


def deployment(name: str, device: str, *, dtype: str = "bfloat16", **settings) -> memory.Deployment:
    config = kvjax_models.KNOWN_MODELS[name]
    return memory.Deployment(
        model=kvjax_models.model_spec(config, dtype),
        size=kvjax_models.model_size(config, dtype),
        accelerator=memory.ACCELERATORS[device],
        **settings,
    )


# Of Llama-3-70B: 80 layers, 64 query and 8 KV heads of 128, hidden size 8192, MLP size 28672, 128,256 words, bfloat16.
LAYER = 2 * 8192 * (64 + 8) * 128 + 3 * 8192 * 28672 + 2 * 8192
EMBEDDING = 128_256 * 8192
WEIGHTS = 2 * (80 * LAYER + 2 * EMBEDDING + 8192)
LOOKED_UP = 2 * EMBEDDING
ROW = 2 * 128 * 2


@pytest.mark.parametrize(("device", "bandwidth"), [("h100-80gb", 3.352e12), ("v5e", 0.819e12)])
def test_llama_3_70b_at_128000_tokens_by_hand(device, bandwidth):
    asked = deployment("llama-3-70b", device, context=128_000, batch=4)
    one = memory.full_cache_bytes(asked.model, batch=1, length=128_000)
    # 2 B L n K D P: 41.9 GB a row, 167.8 GB for four.
    assert one == 2 * 1 * 80 * 128_000 * 8 * 128 * 2 == 41_943_040_000
    assert asked.full_bytes == 4 * one == 167_772_160_000
    assert asked.size.weight_bytes == WEIGHTS == 141_107_412_992

    full, snapkv, h2o = memory.plan([kvjax.Full(), kvjax.SnapKV(budget=4096), kvjax.H2O(budget=4096)], asked)
    # The prompt is padded to 131,072, the answer has room for 256; a slot has its position, a head its length, the
    # row its next position.
    assert full.cache_bytes == 4 * (80 * (8 * (131_072 + 256) * (ROW + 4) + 8 * 4) + 4)
    assert snapkv.cache_bytes == 4 * (80 * (8 * (4096 + 256) * (ROW + 4) + 8 * 4) + 4)
    assert h2o.cache_bytes == 4 * (80 * (8 * 4096 * (ROW + 4 + 4) + 8 * 4) + 4)
    assert full.share == pytest.approx(1.034, abs=5e-4)

    # A step, 128 tokens into the answer: whole blocks of 64 rows on the GPU, tiles of 8 on the TPU, which divide
    # all lengths here. H2O: scores of the group's 8 query heads out and in, the sum in and out, the position in.
    step = WEIGHTS - LOOKED_UP
    assert full.step_bytes() == step + 4 * 80 * 8 * (128_000 + 128) * ROW
    assert snapkv.step_bytes() == step + 4 * 80 * 8 * (4096 + 128) * ROW
    assert h2o.step_bytes() == step + 4 * 80 * 8 * 4096 * (ROW + 4 * (2 * 8 + 3))
    for entry in (full, snapkv, h2o):
        assert entry.tokens_per_second() == pytest.approx(4 * bandwidth / entry.step_bytes())
        # The weights alone are more than either holds.
        assert (entry.largest_batch, entry.largest_prefill, entry.fits) == (0, 0, False)


def test_rows_that_fit_by_hand():
    # Llama-3.1-8B: 32 layers, 8 KV heads of 128, hidden size 4096, MLP size 14336.
    asked = deployment("llama-3.1-8b", "h100-80gb", context=32_768)
    weights = 2 * 8_030_261_248
    # Residual stream and norm, gate and up, one layer's keys and values.
    workspace = 32_768 * 2 * (2 * 4096 + 2 * 14336 + 2 * 8 * 128)
    row = 32 * (8 * (32_768 + 256) * (ROW + 4) + 8 * 4) + 4
    (full,) = memory.plan([kvjax.Full()], asked)
    assert asked.workspace_bytes == workspace
    assert full.largest_batch == (80 * 10**9 - weights - workspace) // row == 14
    assert full.largest_prefill == (80 * 10**9 - weights) // (row + workspace) == 9


def test_devices_share_what_heads_have_and_repeat_the_residual_stream():
    asked = {count: deployment("llama-3-70b", "h200", context=16_384, devices=count) for count in (1, 8, 16)}
    plans = {count: memory.plan([kvjax.Full()], deployed)[0] for count, deployed in asked.items()}
    assert asked[8].weight_bytes == WEIGHTS / 8
    # Residual stream and norm whole, the rest an eighth.
    assert asked[8].workspace_bytes == 16_384 * 2 * (2 * 8192 + (2 * 28672 + 2 * 8 * 128) / 8)
    assert plans[8].step_seconds() == pytest.approx(plans[1].step_seconds() / 8)
    # Of 16 devices two hold the same KV head.
    rows = plans[16].row_step_bytes / 8 + (WEIGHTS - LOOKED_UP) / 16
    assert plans[16].step_seconds() == pytest.approx(rows / 4.8e12)
    assert memory.device_counts(asked[1].model) == [1, 2, 4, 8, 16, 32, 64]
    assert memory.fewest_devices(kvjax.Full(), asked[1]) == 2


def test_plain_jax_moves_all_slots_twice():
    asked = deployment("llama-3.1-8b", "a100-80gb", context=8192)
    (snapkv,) = memory.plan([kvjax.SnapKV(budget=1024)], asked)
    assert snapkv.row_step_bytes == 2 * 32 * 8 * (1024 + 256) * ROW


def test_recommendations_rest_on_the_figures():
    policies = [kvjax.Full(), kvjax.StreamingLLM(budget=4096), kvjax.SnapKV(budget=4096), kvjax.H2O(budget=4096)]

    def chosen(*policies: kvjax.Policy, **asked):
        plans = memory.plan(policies, deployment("llama-3.1-8b", "h100-80gb", **asked))
        found = {entry.work: entry for entry in memory.recommend(plans)}
        names = [None if entry.chosen is None else type(entry.chosen.policy).__name__ for entry in found.values()]
        return names, [entry.reason for entry in found.values()]

    # One row of 8,192 tokens: the weights are nearly all that a step reads.
    names, (_, long, many) = chosen(*policies, context=8192)
    assert names == ["StreamingLLM", "Full", "SnapKV"]
    assert "the fastest other would be 1.03 times as fast" in long
    assert "full caches fit with" in many
    # Eight rows of 65,536: full caches read most, then do not fit.
    names, (_, long, _) = chosen(*policies, context=65_536, batch=4)
    assert names == ["StreamingLLM", "SnapKV", "SnapKV"]
    assert "times as fast a step as the full cache" in long
    assert "for later ones take Full" in long
    names, (_, long, _) = chosen(*policies, context=65_536, batch=16)
    assert names == ["StreamingLLM", "SnapKV", "SnapKV"]
    assert "full caches for 16 would take more than there is" in long
    # None that is endless, none that finds things.
    names, (chat, _, _) = chosen(kvjax.Full(), context=8192)
    assert names == [None, "Full", "Full"]
    assert "StreamingLLM's does not grow" in chat
    names, (_, long, _) = chosen(policies[1], context=8192)
    assert names == ["StreamingLLM", None, "StreamingLLM"]
    assert "none fits" in long


def test_where_nothing_fits_the_devices_that_it_takes_are_told():
    plans = memory.plan([kvjax.SnapKV(budget=4096)], deployment("llama-3-70b", "h100-80gb", context=32_768))
    assert {entry.chosen for entry in memory.recommend(plans)} == {None}
    reason = memory.recommend(plans)[0].reason
    assert "the weights alone take 141 GB of 80 GB" in reason
    assert "needs 2 such devices" in reason


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 0}, "`context` must be at least 1 token, got 0."),
        ({"context": 9, "batch": 0}, "`batch` must be at least 1 row, got 0."),
        ({"context": 9, "max_new_tokens": 0}, "`max_new_tokens` must be at least 1, got 0."),
        ({"context": 9, "cache_dtype": "int8"}, "`cache_dtype` must be float32 or bfloat16, got int8."),
        (
            {"context": 9, "devices": 3},
            "`devices` must divide the model's 32 query heads, and its 8 KV heads or be a multiple of them, got 3.",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        deployment("llama-3.1-8b", "h200", **settings)


def test_a_budget_above_the_context_is_a_sentence():
    with pytest.raises(ValueError, match="`budget` must not exceed the `context` of 1000 tokens, got 2000"):
        memory.plan([kvjax.SnapKV(budget=2000)], deployment("llama-3.1-8b", "h200", context=1000))


def test_planning_starts_no_device():
    program = (
        "import kvjax, kvjax_models, jax._src.xla_bridge as bridge; from kvjax import memory\n"
        "config = kvjax_models.KNOWN_MODELS['smollm2-135m']\n"
        "sizes = {'model': kvjax_models.model_spec(config, 'bfloat16')}\n"
        "sizes |= {'size': kvjax_models.model_size(config, 'bfloat16'), 'context': 4096}\n"
        "for name in ('v5e', 'h200'):\n"
        "    deployment = memory.Deployment(accelerator=memory.ACCELERATORS[name], **sizes)\n"
        "    memory.recommend(memory.plan([kvjax.H2O(budget=64), kvjax.AdaKV(budget=64)], deployment))\n"
        "assert not bridge.backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
