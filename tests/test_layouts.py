"""Keys and values that lie apart, as plain JAX on a CPU has them, against the rows that everything else has."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.state import Cache, for_platform, whole_rows
from kvjax_kernels import SplitRows

PATTERN = kvjax.HeadPattern.of([[0.1, 0.9], [0.8, 0.7], [0.2, 0.3], [0.6, 0.4]])
POLICIES = {
    "full": kvjax.Full(),
    "streaming_llm": kvjax.StreamingLLM(budget=16),
    "h2o": kvjax.H2O(budget=16),
    "pyramidkv": kvjax.PyramidKV(budget=24, window=4),
    "ada_kv": kvjax.AdaKV(budget=24, window=4),
    "duo_attention": kvjax.DuoAttention(pattern=PATTERN, sinks=4, recent=12),
}
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 512, length).tolist() for length in (60, 21)]
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def in_rows(cache: Cache) -> Cache:
    """The same cache, rows whole."""
    return cache.laid_out(tuple(dataclasses.replace(spec, split=False) for spec in cache.specs))


def assert_same(cache: Cache, other: Cache) -> None:
    """The same tokens in the same slots, their rows and scores but for rounding."""
    for spec, state, other_state in zip(cache.specs, cache.layers, other.layers, strict=True):
        np.testing.assert_array_equal(state.positions, other_state.positions)
        np.testing.assert_array_equal(state.lengths, other_state.lengths)
        held = np.asarray(state.positions) != kvjax.EMPTY
        rows, other_rows = (np.asarray(whole_rows(x, spec))[held] for x in (state, other_state))
        np.testing.assert_allclose(rows, other_rows, atol=5e-5)
        if state.scores is not None:
            np.testing.assert_allclose(np.asarray(state.scores)[held], np.asarray(other_state.scores)[held], atol=5e-5)


@each_policy
def test_both_layouts_decode_and_extend_alike(tiny, policy):
    logits, cache = kvjax.prefill(tiny, PROMPTS, policy=policy, max_new_tokens=6)
    rows = in_rows(cache)
    assert all(
        isinstance(state.kv, SplitRows) != spec.shared for spec, state in zip(cache.specs, cache.layers, strict=True)
    )
    assert not any(isinstance(state.kv, SplitRows) for state in rows.layers)
    assert kvjax.cache_bytes(cache) == kvjax.cache_bytes(rows)
    for _ in range(4):
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits, cache = kvjax.decode(tiny, cache, token, donate=False)
        other, rows = kvjax.decode(tiny, rows, token, donate=False)
        np.testing.assert_allclose(logits, other, atol=1e-4)
        assert_same(cache, rows)
    logits, cache = kvjax.extend(tiny, cache, PROMPTS[::-1])
    other, rows = kvjax.extend(tiny, rows, PROMPTS[::-1])
    np.testing.assert_allclose(logits, other, atol=1e-4)
    assert_same(cache, rows)


def test_other_kernels_get_whole_rows(tiny):
    _, cache = kvjax.prefill(tiny, PROMPTS, policy=POLICIES["h2o"], max_new_tokens=6)
    whole = cache.using("tpu-interpret")
    assert not any(isinstance(state.kv, SplitRows) for state in whole.layers)
    assert whole.specs[0].implementation == "tpu-interpret"
    back = whole.using(None)
    assert jax.tree.structure(back) == jax.tree.structure(cache)
    jax.tree.map(np.testing.assert_array_equal, back, cache)


@pytest.mark.parametrize(
    ("platform", "implementation", "split"),
    [
        ("cpu", None, True),
        ("cpu", "xla", True),
        ("cpu", (("prefill_attention", "reference"),), True),
        ("cpu", "reference", False),
        ("cpu", "gpu-interpret", False),
        ("cpu", (("ragged_decode_attention", "tpu-interpret"),), False),
        ("gpu", None, False),
        ("tpu", "xla", False),
    ],
)
def test_the_layout_follows_what_reads_it(tiny, monkeypatch, platform, implementation, split):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    duo = POLICIES["duo_attention"].layer_specs(tiny.spec, 64, 8)
    shared = POLICIES["ada_kv"].layer_specs(tiny.spec, 64, 8)
    assert {spec.split for spec in for_platform(duo, implementation)} == {split}
    assert {spec.implementation for spec in for_platform(duo, implementation)} == {implementation}
    assert not any(spec.split for spec in for_platform(shared, implementation))
