"""What generation costs: programs, copies and bytes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import kvjax.decoding
import kvjax.prompts
import kvjax.steps
import kvjax_models
from kvjax.rope import Rope
from kvjax.state import for_platform

NEW = 8
RNG = np.random.default_rng(5)
# All fit one bucket of 16 tokens, so that few shapes are compiled.
LONG, SHORT, WHOLE = (RNG.integers(3, 512, length).tolist() for length in (14, 3, 16))
MORE = RNG.integers(3, 512, 11).tolist()

run = functools.partial(kvjax.generate, max_new_tokens=NEW, stop_tokens=())


POLICIES = ("full", "streaming_llm", "streaming_llm_masked", "snapkv", "h2o")
# Those whose heads have different lengths, where shapes are what is tested.
UNEQUAL = ("ada_kv", "pyramidkv", "duo_attention")


def compilations() -> tuple[int, ...]:
    steps: tuple[Any, ...] = (kvjax.steps._prefill, kvjax.steps._extend, kvjax.decoding.decode_loop)
    return tuple(step._cache_size() for step in steps)


@pytest.mark.parametrize("policy", [*POLICIES, "pyramidkv"], indirect=True)
def test_nothing_is_compiled_again_for_other_values_of_the_same_shape(model, policy):
    # A setting is switched on by another value than 0 or None; its value is an array like any other.
    run(model, [SHORT, LONG], policy=policy, temperature=1.0, top_p=0.9)
    first = compilations()
    run(model, [LONG, MORE], policy=dataclasses.replace(policy), temperature=0.3, top_p=0.5, seed=99)
    settings = {"temperature": 1.0, "top_p": 0.9, "seed": [4, 5], "callback": lambda new: None}
    run(model, [[7], WHOLE], policy=policy, **settings)
    assert compilations() == first


def test_another_turn_of_the_same_bucket_is_compiled_once(model):
    first = run(model, LONG[:9])
    run(model, MORE, cache=first.cache)
    before = compilations()
    other = run(model, LONG[:10])
    run(model, MORE[:6], cache=other.cache)
    assert compilations() == before


@pytest.fixture(scope="module")
def wide(tiny):
    """A model whose cached rows are large beside its queries."""
    config = dataclasses.replace(
        tiny.config,
        vocab_size=64,
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=2,
        head_dim=64,
        rope=Rope(head_dim=64),
    )
    return kvjax_models.Llama(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", [*POLICIES, *UNEQUAL])
@pytest.mark.usefixtures("no_shape_checks")  # Lowering makes a cache of descriptions, not of arrays.
def test_a_decoding_step_writes_into_the_cache_it_was_given(wide, name, policy_of):
    policy = policy_of(name, 1024)
    logits, cache = kvjax.prefill(wide, np.arange(1024) % 64, policy=policy, max_new_tokens=NEW)
    size = kvjax.cache_bytes(cache)
    # Beside the cache, room for one layer's rows: that is where NaN in empty slots would be cleared.
    allowed = max(sum(leaf.nbytes for leaf in jax.tree.leaves(layer.kv)) for layer in cache.layers)
    leaves, structure = jax.tree.flatten(wide)
    token = jnp.zeros(1, jnp.int32)
    progress = kvjax.decoding.Progress.start(cache, logits, room=NEW)
    settings = {"stops": jnp.zeros(1, jnp.int32), "keys": jax.random.split(jax.random.key(0), 1), "sampling": None}
    steps = {
        "decode": kvjax.steps._decode_donated.lower(leaves, cache, token, structure=structure),
        "generate": kvjax.decoding.decode_loop.lower(leaves, progress, structure=structure, steps=NEW, **settings),
    }
    for step, lowered in steps.items():
        memory: Any = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size, step
        assert memory.temp_size_in_bytes < 1.1 * allowed, f"{step}: {memory.temp_size_in_bytes}, not {allowed}"


@pytest.mark.parametrize("name", [*POLICIES, *UNEQUAL])
def test_a_prefill_takes_no_more_room_with_more_layers(tiny, name, policy_of, cut):
    """Broken by: every layer's rows held until all choices are made at the end; buffers made at the start."""
    policy = whole = policy_of(name, 16)
    tokens = np.zeros((1, 1024), np.int32)
    room = []
    for layers in (2, 4):
        llama = cut(tiny, num_hidden_layers=layers)
        if name == "duo_attention":
            pattern = kvjax.HeadPattern.of(whole.pattern.scores[:layers])
            policy = dataclasses.replace(policy, pattern=pattern)
        specs = for_platform(policy.layer_specs(llama.spec, 1024, NEW, shortest=1024), None)
        leaves, structure = jax.tree.flatten(llama)
        settings = {"structure": structure, "policy": policy, "specs": specs, "room": NEW, "logits": "last"}
        lowered = kvjax.steps._prefill.lower(leaves, tokens, np.full(1, 1024, np.int32), **settings)
        memory: Any = lowered.compile().memory_analysis()
        room.append(memory.temp_size_in_bytes)
    queries = 1024 * tiny.spec.num_query_heads * tiny.spec.head_dim * 4
    assert room[1] - room[0] < queries / 2, (
        f"{room}: each further layer takes as much as its queries, {queries}, or more"
    )


def test_statistics_are_those_by_hand(model, policy_of):
    result = run(model, [SHORT, LONG], policy=policy_of("snapkv", 10))
    stats = result.stats
    assert stats.prompt_tokens == (3, 14)
    assert stats.new_tokens == (8, 8)
    # 3 and 10 tokens are kept of the prompts, and 8 are decoded.
    assert stats.kept_tokens == (11 + 18) / 2
    assert stats.seen_tokens == (11 + 22) / 2
    # Two layers of two rows and two heads: 18 slots of 32 float32 and a position, and a length a head; two positions.
    by_hand = 2 * 2 * 2 * (18 * (32 * 4 + 4) + 4) + 2 * 4
    assert stats.cache_bytes == kvjax.cache_bytes(result.cache) == by_hand
    # Keys and values of 22 tokens in both rows.
    assert stats.full_cache_bytes == 2 * (2 * 2 * 22 * 2 * 16) * 4
    assert stats.prefill_seconds > 0
    assert stats.tokens_per_second == pytest.approx(16 / stats.decode_seconds)


def test_a_streams_bytes_do_not_grow(model, policy_of):
    sizes = {
        kvjax.cache_bytes(kvjax.prefill(model, prompt, policy=policy_of("streaming_llm", 10), max_new_tokens=new)[1])
        for prompt, new in ((SHORT, NEW), (LONG, NEW), (LONG, 1000))
    }
    assert sizes == {2 * 2 * (10 * (32 * 4 + 4) + 4) + 4}


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16])
def test_a_bfloat16_cache_takes_half_the_bytes(model, dtype):
    half = run(model, LONG, cache_dtype=dtype)
    assert {leaf.dtype for layer in half.cache.layers for leaf in jax.tree.leaves(layer.kv)} == {jnp.dtype("bfloat16")}
    # Rows are halved, positions are not.
    assert half.stats.cache_bytes == 2 * 2 * (24 * (32 * 2 + 4) + 4) + 4
    assert half.stats.full_cache_bytes * 2 == run(model, LONG).stats.full_cache_bytes
    assert np.isin(half.tokens, np.arange(512)).all()


def test_a_bfloat16_cache_changes_little(model):
    def logits(cache_dtype):
        prompts = [SHORT, LONG]
        _, cache = kvjax.prefill(model, prompts, policy=kvjax.Full(), max_new_tokens=NEW, cache_dtype=cache_dtype)
        assert cache.specs[0].dtype == cache_dtype
        return kvjax.decode(model, cache, [7, 7])[0]

    difference = np.abs(logits("bfloat16") - logits("float32")).max()
    assert 0 < difference < 0.1
