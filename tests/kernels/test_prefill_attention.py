"""Attention of prompts and of further tokens, block by block, against softmax in float64."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from kvjax_kernels import extend_attention, prefill_attention
from kvjax_kernels.blocks import Tile
from kvjax_kernels.extend_attention import xla as extend_xla
from kvjax_kernels.prefill_attention import tpu, xla

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}

prefill = jax.jit(prefill_attention, static_argnames=("window", "implementation"))
extend = jax.jit(extend_attention, static_argnames=("window", "implementation"))


@functools.cache
def prompt(length: int, head_dim: int = 16, group: int = 3, dtype: str = "float32", kv_heads: int = 2):
    """Query, key and value of two rows."""
    keys = jax.random.split(jax.random.key(length), 3)
    heads = (group * kv_heads, kv_heads, kv_heads)
    return tuple(
        jax.random.normal(key, (2, length, count, head_dim)).astype(dtype)
        for key, count in zip(keys, heads, strict=True)
    )


def by_position(query, key, value, query_positions, key_positions, window=None):
    """Output and log-sum-exp of queries that see keys at p - window to p; key and value [B, K, S, D]."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, length, heads, head_dim = query.shape
    group = heads // key.shape[1]
    output, log_sum_exp = np.zeros(query.shape), np.full((batch, heads, length), np.float64(np.float32(-1e30)))
    for row in range(batch):
        for head in range(heads):
            columns = np.asarray(key_positions[row, head // group])
            keys, values = key[row, head // group], value[row, head // group]
            for index, position in enumerate(np.asarray(query_positions[row])):
                seen = (columns >= 0) & (columns <= position) & (position >= 0)
                if window is not None:
                    seen &= columns >= position - window
                if not seen.any():
                    continue
                scores = np.exp(keys[seen] @ query[row, index, head] / np.sqrt(head_dim))
                log_sum_exp[row, head, index] = np.log(scores.sum())
                output[row, index, head] = scores / scores.sum() @ values[seen]
    return output, log_sum_exp


def causal(query, key, value, window=None):
    batch, length, kv_heads, _ = key.shape
    positions = np.broadcast_to(np.arange(length), (batch, length))
    key_positions = np.broadcast_to(np.arange(length), (batch, kv_heads, length))
    key, value = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (key, value))
    return by_position(query, key, value, positions, key_positions, window)


def assert_equal_to(result, reference, dtype="float32"):
    for name, actual, wanted in zip(("output", "log_sum_exp"), result, reference, strict=True):
        largest = np.abs(np.asarray(actual, np.float64) - wanted).max()
        assert largest <= LIMITS[dtype], f"{name}: the largest difference is {largest:.1e}"


# Tiles are 256 by 256, or one of up to 470: one token, around one tile, several, and no multiple.
@pytest.mark.parametrize("length", [1, 255, 257, 470, 471, 513, 700])
def test_a_prompt_of_any_length_sees_itself(length):
    arrays = prompt(length)
    assert_equal_to(prefill(*arrays), causal(*arrays))


@pytest.mark.parametrize("window", [0, 1, 100, 1000])
@pytest.mark.parametrize("length", [257, 700])
def test_a_window_hides_what_is_further_back(length, window):
    arrays = prompt(length)
    assert_equal_to(prefill(*arrays, window=window), causal(*arrays, window=window))


def test_a_window_of_0_gives_each_token_its_own_value():
    query, key, value = prompt(257)
    output, _ = prefill(query, key, value, window=0)
    np.testing.assert_allclose(output, jnp.repeat(value, 3, axis=2), rtol=1e-6)


@pytest.mark.parametrize(("head_dim", "group"), [(16, 1), (32, 4), (80, 7), (128, 8)])
def test_query_heads_share_their_kv_head(head_dim, group):
    arrays = prompt(70, head_dim, group)
    assert_equal_to(prefill(*arrays), causal(*arrays))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 8)])
def test_bfloat16_stays_close_to_its_inputs_in_float64(head_dim, group, window):
    arrays = prompt(300, head_dim, group, "bfloat16")
    output, log_sum_exp = prefill(*arrays, window=window)
    assert (output.dtype, log_sum_exp.dtype) == (jnp.bfloat16, jnp.float32)
    assert_equal_to((output, log_sum_exp), causal(*arrays, window=window), "bfloat16")


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("length", [1, 40])
def test_the_reference_is_textbook_attention(length, window):
    arrays = prompt(length)
    assert_equal_to(prefill(*arrays, window=window, implementation="reference"), causal(*arrays, window=window))


@pytest.mark.parametrize("window", [None, 100])
def test_what_stands_right_of_a_rows_end_changes_nothing(window):
    arrays = prompt(700)
    ends = np.asarray([300, 1])
    inside = np.arange(700) < ends[:, None]
    rubbish = [jnp.where(inside[:, :, None, None], x, 1e4) for x in arrays]
    for clean, dirty in zip(prefill(*arrays, window=window), prefill(*rubbish, window=window), strict=True):
        for row, end in enumerate(ends):
            clean_row, dirty_row = (x[row] if x.ndim == 4 else x[row].T for x in (clean, dirty))
            np.testing.assert_array_equal(clean_row[:end], dirty_row[:end])


def test_blocks_that_no_query_can_see_are_not_read():
    query, key, value = prompt(1100)
    # A weight of 0 times NaN would be NaN.
    output, _ = prefill(query, key, value.at[:, :512].set(jnp.nan), window=100)
    # Queries from 768 on, a block's start, see keys from 668 on: the first two blocks of 256 keys are left out.
    assert np.isfinite(output[:, 768:]).all()
    assert np.isnan(output[:, 600]).all()
    output, _ = prefill(query, key, value.at[:, 1024:].set(jnp.nan))
    assert np.isfinite(output[:, :1024]).all()


def further_tokens(queries: int, slots: int, kv_heads: int = 2) -> Sequence[Any]:
    """Queries of two rows, keys and values; positions of both; NaN where a slot is empty."""
    rng = np.random.default_rng(queries)
    query = rng.normal(size=(2, queries, 3 * kv_heads, 16)).astype(np.float32)
    key, value = (rng.normal(size=(2, kv_heads, slots, 16)).astype(np.float32) for _ in range(2))
    # In any order, other ones for each head; a fifth of the slots are empty, and some queries are pads.
    key_positions = rng.permuted(np.tile(np.arange(slots, dtype=np.int32), (2, kv_heads, 1)), axis=-1) * 2
    key_positions[rng.random(key_positions.shape) < 0.2] = -1
    query_positions = rng.integers(-1, 2 * slots, (2, queries), dtype=np.int32)
    query_positions[0, -1] = -1
    empty = (key_positions < 0)[..., None]
    key, value = (np.where(empty, np.nan, x).astype(np.float32) for x in (key, value))
    return query, key, value, query_positions, key_positions


@pytest.mark.parametrize("window", [None, 0, 50])
@pytest.mark.parametrize(("queries", "slots"), [(1, 1), (5, 40), (300, 1100)])
def test_new_tokens_see_cached_ones_by_position(queries, slots, window):
    arrays = further_tokens(queries, slots)
    query_positions = arrays[3]
    wanted = by_position(*arrays, window=window)
    for implementation in ("xla", "reference"):
        result = extend(*arrays, window=window, implementation=implementation)
        assert_equal_to(result, wanted)
        np.testing.assert_array_equal(np.asarray(result[0])[query_positions < 0], 0.0)


# Of six heads in two rows: one, two (of one row, then of both), those of a row, all; sides that differ, and do not
# divide the 150 tokens.
@pytest.mark.parametrize("tile", [Tile(1, 32, 64), Tile(2, 64, 32), Tile(3, 64, 64), Tile(6, 150, 32)], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_any_tile_gives_the_same_attention(tile, window, monkeypatch):
    for module in (xla, extend_xla):
        monkeypatch.setattr(module, "choose_tile", lambda *_: tile)
    arrays = prompt(150, kv_heads=3)
    result = inspect.unwrap(xla.run)(*arrays, window=window)
    assert_equal_to(result, causal(*arrays, window=window))
    arrays = further_tokens(150, 150, kv_heads=3)
    result = inspect.unwrap(extend_xla.run)(*map(jnp.asarray, arrays), window=window)
    assert_equal_to(result, by_position(*arrays, window=window))


@pytest.mark.parametrize("window", [None, 0, 40, 64, 1000])
@pytest.mark.parametrize("length", [32, 150])
def test_tiles_are_chosen_by_how_many_there_are(length, window, monkeypatch):
    counts = []

    def choose(*arguments):
        counts.append(arguments[-1](32))
        return Tile(1, 32, 32)

    monkeypatch.setattr(xla, "choose_tile", choose)
    jax.eval_shape(functools.partial(inspect.unwrap(xla.run), window=window), *prompt(length))
    starts = np.arange(0, length, 32)
    # Tiles on and below the diagonal, whose oldest query sees their newest key.
    seen = starts[:, None] >= starts
    if window is not None:
        seen &= starts[:, None] - (starts + 31) <= window
    assert counts == [seen.sum()]


def test_the_whole_prompt_as_new_tokens_is_a_prompt():
    query, key, value = prompt(257)
    positions = np.broadcast_to(np.arange(257, dtype=np.int32), (2, 257))
    key_positions = np.broadcast_to(positions[:, None], (2, 2, 257))
    result = extend(query, key.swapaxes(1, 2), value.swapaxes(1, 2), positions, key_positions)
    assert_equal_to(result, (np.asarray(x) for x in prefill(query, key, value)))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 1)])
def test_splash_is_the_same_attention(head_dim, group, window):
    arrays = prompt(256, head_dim, group, kv_heads=1)
    result = tpu.run(*arrays, window=window, interpret=True)
    wanted = prefill(*arrays, window=window, implementation="reference")
    assert_equal_to(result, (np.asarray(x) for x in wanted))


@pytest.mark.parametrize(
    ("length", "head_dim", "dtype", "message"),
    [
        (200, 64, "float32", "whole blocks of 128 tokens, not 200 tokens"),
        (256, 80, "float32", "head sizes 64, 96 and multiples of 128, not 80"),
        (256, 64, "float16", "bfloat16 or float32, not float16"),
    ],
)
def test_splash_says_what_it_cannot_do(length, head_dim, dtype, message):
    arrays = prompt(length, head_dim, 1, dtype)
    with pytest.raises(NotImplementedError, match=message):
        prefill_attention(*arrays, implementation="tpu-interpret")


def test_a_named_implementation_is_used_or_fails():
    with pytest.raises(NotImplementedError, match=r"cuDNN's attention takes bfloat16 or float16, not float32"):
        prefill_attention(*prompt(16), implementation="gpu")
    with pytest.raises(NotImplementedError, match=r"has no interpreter"):
        prefill_attention(*prompt(16, dtype="bfloat16"), implementation="gpu-interpret")
    with pytest.raises(NotImplementedError, match=r"`extend_attention` has no TPU kernel"):
        extend_attention(
            zeros(1, 4, 2, 8), zeros(1, 2, 5, 8), zeros(1, 2, 5, 8), *two_positions(), implementation="tpu"
        )
    with pytest.raises(Exception, match=r"(?i)cpu|interpret"):
        jax.block_until_ready(prefill_attention(*prompt(256, 64, 1), implementation="tpu"))


@pytest.mark.parametrize("log_sum_exp", [False, True])
def test_a_gpu_program_calls_cudnn(log_sum_exp, monkeypatch):
    # JAX asks the machine's cuDNN for its version, and the machine's GPU for its age; here is neither.
    for question in ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal"):
        monkeypatch.setattr(fused_attention_stablehlo, question, lambda *_: 92_000)
    shape = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    traced = jax.jit(lambda *arrays: prefill_attention(*arrays, log_sum_exp=log_sum_exp, implementation="gpu")).trace(
        shape, shape, shape
    )
    assert "cudnn" in traced.lower(lowering_platforms=("cuda",)).as_text()
    output, sums = traced.out_info
    assert output.shape == (1, 256, 4, 64)
    assert (sums is not None and sums.shape == (1, 4, 256)) if log_sum_exp else sums is None


def two_positions() -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 2, 5), jnp.int32)


def zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape)


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        (((1, 4, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8)), {}, r"`query` \[B, T, N, D\], `key` and `value` .* must agree"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 1, 8)), {}, r"must agree, got .*\(1, 4, 1, 8\)"),
        (((1, 4, 2, 8), (1, 4, 2, 4), (1, 4, 2, 4)), {}, r"must agree"),
        (((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), {}, r"3 query heads do not group over 2 KV heads"),
        (((1, 4, 2, 8),) * 3, {"window": -1}, r"`window` must not be negative, got -1"),
        (((1, 4, 2, 8),) * 3, {"implementation": "magic"}, r"`implementation` must be one of .*xla.*got 'magic'"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_a_prompt_says_which_argument_does_not_fit(shapes, settings, message):
    with pytest.raises(ValueError, match=message):
        prefill_attention(*(zeros(*shape) for shape in shapes), **settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": (1, 2, 6, 8)}, r"`key`, `value` .* and `key_positions` .* must agree"),
        ({"key_positions": (1, 1, 5)}, r"must agree, got .*\(1, 1, 5\)"),
        ({"query": (1, 4, 3, 8)}, r"group over 2 KV heads, got \(1, 4, 3, 8\)"),
        ({"query_positions": (1, 3)}, r"must match `query_positions` .*\(1, 3\)"),
        ({"implementation": "splash"}, r"`implementation` must be one of reference, xla, .* got 'splash'"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_new_tokens_say_which_argument_does_not_fit(change, message):
    shapes = {
        "query": (1, 4, 2, 8),
        "key": (1, 2, 5, 8),
        "value": (1, 2, 5, 8),
        "query_positions": (1, 4),
        "key_positions": (1, 2, 5),
        **change,
    }
    arguments: dict[str, Any] = {
        name: shape if isinstance(shape, str) else jnp.zeros(shape, "int32" if "positions" in name else "float32")
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=message):
        extend_attention(**arguments)
