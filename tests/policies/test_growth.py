"""What a policy takes of memory grows with the prompt, and never with its square; a selection is a set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.policies.h2o import voters

KV_HEADS, GROUP, HEAD_DIM = 2, 2, 16
# The presets; for the policies as they are by default see test_h2o.py and ../test_reported_faults.py.
POLICIES = {
    "h2o_kvpress": kvjax.H2O.kvpress(compression_ratio=0.5),
    "pyramidkv_kvpress": kvjax.PyramidKV.kvpress(compression_ratio=0.5),
    "tova_kvpress": kvjax.TOVA.kvpress(compression_ratio=0.5),
    "knorm_kvpress": kvjax.Knorm.kvpress(compression_ratio=0.5),
}


def temporary_bytes(policy: kvjax.Policy, model: kvjax.ModelSpec, length: int) -> int:
    """Of one layer's prefill, compiled and never run."""
    spec = policy.layer_specs(model, length, 4)[0]
    shapes = [(1, length, heads, HEAD_DIM) for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
    prefill = jax.jit(lambda *given: policy.prefill(spec, *given, model.rope))
    return prefill.lower(*arrays, positions).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", POLICIES)
def test_a_prefills_memory_grows_with_the_prompt_and_not_with_its_square(make_stream, name):
    model = make_stream(group=GROUP).model
    short, long = (temporary_bytes(POLICIES[name], model, length) for length in (2048, 4096))
    assert long <= 2.3 * short + 2**20
    # A matrix of all tokens by all would be 4096 * 4096 numbers for every KV head.
    assert long < 4096 * 4096 * KV_HEADS


def test_voters_are_counted_without_comparing_all_with_all():
    rng = np.random.default_rng(0)
    for _ in range(50):
        start, length, tokens = int(rng.integers(0, 30)), int(rng.integers(1, 12)), int(rng.integers(1, 20))
        asked = np.full(14, kvjax.EMPTY)
        asked[:length] = start + np.arange(length)
        positions = np.sort(rng.choice(start + length, min(tokens, start + length), replace=False))
        counted = (asked[None] >= positions[:, None]).sum(1)
        given = jnp.asarray(asked[None], jnp.int32), jnp.asarray(positions[None, None], jnp.int32)
        np.testing.assert_array_equal(np.asarray(voters(*given))[0, 0], counted)


@pytest.mark.parametrize("rubbish", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["h2o", "snapkv", "knorm"])
def test_a_selection_is_a_set_whatever_the_keys_hold(make_stream, name, rubbish):
    policy = {"h2o": kvjax.H2O(budget=16), "snapkv": kvjax.SnapKV(budget=16, window=4), "knorm": kvjax.Knorm(budget=16)}
    stream = make_stream(group=GROUP)
    spec = stream.spec(policy[name], 48, 4)
    positions = stream.positions(np.asarray([41, 26]), 48)
    query, key, value = stream.take(positions)
    key = key.at[:, 5:30].set(rubbish)
    _, state = policy[name].prefill(spec, query, key, value, positions, stream.model.rope)
    for row in np.asarray(state.positions).reshape(2, KV_HEADS, -1):
        for head in row:
            kept = head[head != kvjax.EMPTY]
            assert len(set(kept.tolist())) == len(kept) <= 16
