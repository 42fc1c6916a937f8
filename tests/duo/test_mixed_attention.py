"""Mixed attention: against masks written out, in value and derivative, and in memory that is linear in the length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.duo.mixed_attention import Streaming, mixed_attention
from kvjax_kernels import prefill_attention


def arrays(length, *, kv_heads=2, group=2, head_dim=8, dtype="float64", rows=1):
    rng = np.random.default_rng(length)
    shapes = [(rows, length, heads, head_dim) for heads in (kv_heads * group, kv_heads, kv_heads)]
    query, key, value = (jnp.asarray(2 * rng.standard_normal(shape), dtype) for shape in shapes)
    return query, key, value, jnp.asarray(rng.uniform(size=kv_heads), dtype)


def written_out(*inputs, streaming: Streaming):
    """Two softmaxes over masked scores, in NumPy's float64."""
    query, key, value, alpha = (np.asarray(x, np.float64) for x in inputs)
    group = query.shape[2] // key.shape[2]
    key, value = np.repeat(key, group, 2), np.repeat(value, group, 2)
    place = np.arange(query.shape[1])
    causal = place[:, None] >= place[None]
    band = causal & ((place[:, None] - place[None] <= streaming.recent) | (place[None] < streaming.sinks))
    output = 0.0
    for mask, weight in ((causal, alpha), (band, 1 - alpha)):
        scores = np.where(mask, np.einsum("btnd,bsnd->bnts", query, key) / query.shape[3] ** 0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        output += np.einsum("bnts,bsnd->btnd", weights, value) * np.repeat(weight, group)[:, None]
    return output


# 256 is the block: one row, less than a block, whole blocks, and more than two.
@pytest.mark.parametrize(
    ("length", "streaming"),
    [(1, Streaming(0, 1)), (9, Streaming(2, 3)), (512, Streaming(0, 300)), (530, Streaming(5, 40))],
)
def test_value_and_derivatives_are_those_of_two_masked_softmaxes(length, streaming):
    with jax.enable_x64(True):
        inputs = arrays(length)
        outer = jnp.asarray(np.random.default_rng(1).standard_normal(inputs[0].shape))

        def total(*inputs):
            return (mixed_attention(*inputs, streaming) * outer).sum()

        output = jax.jit(mixed_attention, static_argnums=4)(*inputs, streaming)
        np.testing.assert_allclose(output, written_out(*inputs, streaming=streaming), atol=1e-12)
        gradients = jax.jit(jax.grad(total, (0, 1, 2, 3)))(*inputs)
        # One random direction in each argument, by central differences of the NumPy form.
        for index, gradient in enumerate(gradients):
            rng = np.random.default_rng(index)
            direction = rng.standard_normal(gradient.shape)
            moved = []
            for step in (1e-5, -1e-5):
                parts = list(inputs)
                parts[index] = inputs[index] + step * direction
                moved.append(written_out(*parts, streaming=streaming))
            slope = ((moved[0] - moved[1]) * outer).sum() / 2e-5
            np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-7)


def test_alpha_1_is_full_attention_and_alpha_0_streaming_attention():
    query, key, value, _ = arrays(300, dtype="float32")
    streaming = Streaming(4, 20)
    full = prefill_attention(query, key, value, implementation="reference")[0]
    np.testing.assert_allclose(mixed_attention(query, key, value, jnp.ones(2), streaming), full, atol=2e-5)
    nothing = written_out(query, key, value, np.zeros(2), streaming=streaming)
    np.testing.assert_allclose(
        mixed_attention(query, key, value, jnp.zeros(2), streaming=streaming), nothing, atol=2e-5
    )


def test_scores_far_apart_neither_overflow_nor_lose_a_branch():
    query, key, value, alpha = arrays(300, dtype="float32")
    # The rest's scores are some 1,000 above the near ones', and below them.
    for factor in (1.0, -1.0):
        far = key.at[:, 5:100].set(factor * 50.0)
        inputs = (jnp.abs(query) + 5.0, far, value, alpha)
        output, pull_back = jax.vjp(lambda *inputs: mixed_attention(*inputs, Streaming(4, 20)), *inputs)
        np.testing.assert_allclose(output, written_out(*inputs, streaming=Streaming(4, 20)), atol=3e-4)
        assert all(np.isfinite(gradient).all() for gradient in pull_back(output))


def test_bfloat16_is_near_float32_in_value_and_derivatives():
    inputs = arrays(300, dtype="float32", head_dim=16)
    outer = jnp.ones_like(inputs[0])

    def run(*inputs):
        output, pull_back = jax.vjp(lambda *inputs: mixed_attention(*inputs, Streaming(4, 20)), *inputs)
        return output, *pull_back(outer.astype(output.dtype))

    low = [x.astype(jnp.bfloat16) for x in inputs[:3]]
    exact = jax.jit(run)(*(x.astype(jnp.float32) for x in low), inputs[3])
    for near, wanted in zip(jax.jit(run)(*low, inputs[3]), exact, strict=True):
        apart = np.linalg.norm(np.asarray(near, np.float32) - wanted) / np.linalg.norm(wanted)
        assert apart < 0.02, apart


def test_memory_of_both_passes_is_linear_in_the_length():
    def both(*inputs):
        output, pull_back = jax.vjp(lambda *inputs: mixed_attention(*inputs, Streaming(64, 256)), *inputs)
        return pull_back(output)

    def temporary(length):
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32) for heads in (9, 3, 3)]
        compiled = jax.jit(both).lower(*shapes, jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    short, long = temporary(2048), temporary(8192)
    assert long < 4.2 * short
    # One head's matrix of scores would be 268 MB.
    assert long < 220e6, long
