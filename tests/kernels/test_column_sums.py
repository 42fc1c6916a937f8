"""The attention that each token gets in all, tile by tile, against the whole matrix in float64."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import column_sums, extend_attention
from kvjax_kernels.blocks import Tile
from kvjax_kernels.column_sums import xla

sums = jax.jit(column_sums, static_argnames="implementation")
attend = jax.jit(extend_attention)


def case(
    lengths, width, slots, *, head_dim=16, group=3, kv_heads=2, dtype="float32", start: int | np.ndarray = 0
) -> tuple[jax.Array, ...]:
    """Queries at `start` onwards, pads behind `lengths`, over keys at any positions, a fifth of them empty."""
    rng = np.random.default_rng(width + slots)
    query = rng.normal(size=(2, width, kv_heads * group, head_dim))
    key = rng.normal(size=(2, kv_heads, slots, head_dim))
    offset = np.arange(width)[None]
    query_positions = np.where(offset < np.asarray(lengths)[:, None], start + offset, -1).astype(np.int32)
    key_positions = np.tile(np.arange(slots, dtype=np.int32), (2, kv_heads, 1))
    key_positions[rng.random(key_positions.shape) < 0.2] = -1
    query, key = jnp.asarray(query, dtype), jnp.asarray(key, dtype)
    positions = jnp.asarray(query_positions), jnp.asarray(key_positions)
    _, log_sum_exp = attend(query, key, key, *positions)
    return query, jnp.concatenate([key, jnp.full_like(key, jnp.nan)], axis=-1), log_sum_exp, *positions


def expected(query, kv, log_sum_exp, query_positions, key_positions):
    del log_sum_exp
    query, key = (np.asarray(x, np.float64) for x in (query, kv[..., : query.shape[3]]))
    group = query.shape[2] // key.shape[1]
    result = np.zeros(key_positions.shape)
    query_positions, key_positions = np.asarray(query_positions), np.asarray(key_positions)
    for row in range(2):
        for head in range(query.shape[2]):
            columns = key_positions[row, head // group]
            for index, position in enumerate(query_positions[row]):
                seen = (columns >= 0) & (columns <= position)
                if position >= 0 and seen.any():
                    weights = np.exp(key[row, head // group, seen] @ query[row, index, head] / query.shape[3] ** 0.5)
                    result[row, head // group, seen] += weights / weights.sum()
    return result


def assert_equal_to(actual, wanted, limit=1e-4):
    largest = np.abs(np.asarray(actual, np.float64) - wanted).max()
    assert largest < limit, f"the largest difference is {largest:.1e}"


# Tiles are 256 by 256, or one of up to 470. In the last cases the last tiles of queries hold pads only.
@pytest.mark.parametrize(
    ("lengths", "width", "slots"),
    [([1, 1], 1, 1), ([40, 7], 48, 48), ([257, 100], 257, 257), ([700, 513], 700, 700), ([500, 3], 768, 768)],
)
def test_every_tokens_attention_is_summed_over_all_queries(lengths, width, slots):
    arguments = case(lengths, width, slots)
    assert_equal_to(sums(*arguments), expected(*arguments))


@pytest.mark.parametrize(("head_dim", "group"), [(32, 1), (64, 4), (128, 8)])
def test_query_heads_are_summed_over_their_kv_head(head_dim, group):
    arguments = case([40, 7], 48, 48, head_dim=head_dim, group=group)
    assert_equal_to(sums(*arguments), expected(*arguments))


def test_later_queries_count_for_all_that_is_cached():
    arguments = case([300, 20], 300, 700, start=400)
    assert_equal_to(sums(*arguments), expected(*arguments))


# Of six heads in two rows: one, two (of one row, then of both), those of a row, all; sides that differ, and do not
# divide the tokens. The last block of row 1 holds pads only.
@pytest.mark.parametrize("tile", [Tile(1, 32, 64), Tile(2, 64, 32), Tile(3, 64, 64), Tile(6, 150, 32)], ids=str)
@pytest.mark.parametrize("ascending", [True, False])
def test_any_tile_gives_the_same_sums(tile, ascending, monkeypatch):
    monkeypatch.setattr(xla, "choose_tile", lambda *_: tile)
    # Rows at other places, so that one row's bounds are wrong for the other.
    start = np.asarray([[10], [60]] if ascending else [[60], [10]])
    query, kv, log_sum_exp, query_positions, key_positions = case([150, 90], 150, 200, kv_heads=3, start=start)
    if not ascending:
        order = np.random.default_rng(0).permutation(150)
        query, query_positions, log_sum_exp = query[:, order], query_positions[:, order], log_sum_exp[:, :, order]
    arguments = query, kv, log_sum_exp, query_positions, key_positions
    assert_equal_to(inspect.unwrap(xla.run)(*arguments), expected(*arguments))


def test_the_sums_add_up_to_the_queries():
    query, kv, log_sum_exp, query_positions, _ = case([700, 513], 700, 700)
    every = np.tile(np.arange(700, dtype=np.int32), (2, 2, 1))
    key = kv[..., : query.shape[3]]
    _, log_sum_exp = attend(query, key, key, query_positions, every)
    total = sums(query, kv, log_sum_exp, query_positions, every).sum(-1)
    np.testing.assert_allclose(total, [[2100, 2100], [3 * 513, 3 * 513]], rtol=1e-5)


def test_bfloat16_stays_close_to_its_inputs_in_float64():
    arguments = case([300, 20], 300, 300, head_dim=64, dtype="bfloat16")
    wanted = expected(*arguments)
    # Sums of hundreds of probabilities: relative to the largest.
    assert_equal_to(np.asarray(sums(*arguments)) / wanted.max(), wanted / wanted.max(), 1e-2)


@pytest.mark.parametrize(("lengths", "width"), [([1, 1], 1), ([40, 7], 48)])
def test_the_reference_is_textbook_attention(lengths, width):
    arguments = case(lengths, width, width)
    assert_equal_to(sums(*arguments, implementation="reference"), expected(*arguments))


@pytest.mark.usefixtures("no_shape_checks")
def test_says_which_argument_does_not_fit():
    query, kv, log_sum_exp, *rest = case([40, 7], 48, 48)
    positions: Any = rest
    with pytest.raises(ValueError, match=r"`query` .* and `log_sum_exp` \[B, N, T\] must agree"):
        column_sums(query, kv, log_sum_exp[:, :, :3], *positions)
    with pytest.raises(ValueError, match=r"must agree, got float32 \(2, 48, 5, 16\)"):
        column_sums(query[:, :, :5], kv, log_sum_exp, *positions)
    with pytest.raises(ValueError, match=r"`implementation` must be .* got 'magic'"):
        column_sums(query, kv, log_sum_exp, *positions, implementation="magic")
