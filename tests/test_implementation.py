"""Which kernels run can be forced, and is told."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
import kvjax_models
from kvjax.implementation import OPERATIONS
from kvjax.rope import Rope

PROMPT = np.random.default_rng(0).integers(0, 500, 45).tolist()
KERNELS = {"ragged_decode_attention", "pooled_attention", "select_highest", "column_sums", "compact"}
# Together they call every kernel, with every kind of segment and both queries.
POLICIES = {
    "streaming_llm": kvjax.StreamingLLM(budget=24),
    "h2o": kvjax.H2O(budget=24),
    "duo_attention": kvjax.DuoAttention(pattern=kvjax.HeadPattern.of([[0.1, 0.9]]), sinks=4, recent=12),
    "ada_kv": kvjax.AdaKV(budget=24, window=8),
}


@pytest.fixture(scope="module")
def model() -> kvjax_models.Llama:
    """One layer with heads of 64, which every kernel takes."""
    config = dataclasses.replace(
        kvjax_models.KNOWN_MODELS["smollm2-135m"],
        vocab_size=500,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope=Rope(head_dim=64),
    )
    return kvjax_models.Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def answer(model, policy, **settings) -> kvjax.Result:
    return kvjax.generate(model, PROMPT, policy=policy, max_new_tokens=3, stop_tokens=(), **settings)


def scores(model, policy, **settings) -> np.ndarray:
    """Logits of two steps behind a prompt."""
    _, cache = kvjax.prefill(model, PROMPT, policy=policy, max_new_tokens=2, **settings)
    found = []
    for token in (7, 11):
        logits, cache = kvjax.decode(model, cache, [token])
        found.append(logits)
    return np.stack(found)


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_kernels_do_what_plain_jax_does(model, policy, backend):
    forced = dict.fromkeys(KERNELS, f"{backend}-interpret")
    np.testing.assert_allclose(scores(model, policy, implementation=forced), scores(model, policy), atol=2e-5)


def test_statistics_tell_what_ran(model):
    policy = POLICIES["h2o"]
    on_cpu = {"prefill_attention": "xla", "ragged_decode_attention": "xla", "column_sums": "xla"}
    on_cpu |= {"select_highest": "xla", "compact": "xla"}
    assert answer(model, policy).stats.implementations == on_cpu
    # A program that is compiled already tells it too.
    assert answer(model, policy).stats.implementations == on_cpu
    forced = answer(model, policy, implementation={"column_sums": "reference"}).stats.implementations
    assert forced == on_cpu | {"column_sums": "reference"}
    forced = answer(model, policy, implementation="reference").stats.implementations
    assert set(forced.values()) == {"reference"}


def test_a_cache_goes_on_with_its_own_unless_one_is_named(model):
    first = answer(model, kvjax.Full(), implementation={"ragged_decode_attention": "reference"})
    second = kvjax.generate(model, PROMPT[:5], cache=first.cache, max_new_tokens=1)
    assert second.stats.implementations == {"extend_attention": "xla", "ragged_decode_attention": "reference"}
    third = kvjax.generate(model, PROMPT[:5], cache=second.cache, max_new_tokens=1, implementation="xla")
    assert third.stats.implementations == {"extend_attention": "xla", "ragged_decode_attention": "xla"}


def test_text_streams_tell_what_ran(model):
    result = answer(model, kvjax.Full(), callback=lambda token: None)
    assert result.stats.implementations == {"prefill_attention": "xla", "ragged_decode_attention": "xla"}


@pytest.mark.parametrize(
    ("implementation", "error", "message"),
    [
        ("magic", ValueError, r"`implementation` must be one of reference, xla, .*, got 'magic'"),
        ({"compact": "magic"}, ValueError, r"must be one of .*, got 'magic'"),
        ({"attention": "xla"}, ValueError, r"knows the operations prefill_attention, .*, got 'attention'"),
        ("tpu", NotImplementedError, r"`implementation='tpu'` needs a TPU, and JAX computes on cpu here"),
        ({"compact": "gpu"}, NotImplementedError, r"`implementation='gpu'` needs a GPU"),
        ("gpu-interpret", NotImplementedError, r"cuDNN's attention .* not float32"),
    ],
)
def test_what_cannot_be_forced_is_said(model, implementation, error, message):
    with pytest.raises(error, match=message):
        answer(model, kvjax.Full(), implementation=implementation)


def test_every_operation_is_known():
    assert set(OPERATIONS) == KERNELS | {"prefill_attention", "extend_attention"}
