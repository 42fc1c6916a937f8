"""Votes of the last queries, pooled, and the choice of the highest, against NumPy in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import pooled_attention, pooled_selection, select_highest

PLAIN = {"excluded": 0, "kernel": 1, "pooling": "max", "group_reduce": "mean", "reduce": "before_pooling"}
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}

attend = jax.jit(pooled_attention, static_argnames=(*PLAIN, "implementation"))
select = jax.jit(select_highest, static_argnames=("most", "implementation"))
choose = jax.jit(pooled_selection, static_argnames=(*PLAIN, "most", "sinks", "implementation"))


def case(lengths, *, window, slots, group=2, head_dim=16, dtype="float32") -> tuple[jax.Array, ...]:
    """Tokens at gaps of one or two positions, NaN in the slots behind; queries up to the longest head's last token."""
    lengths = np.asarray(lengths)
    batch, kv_heads = lengths.shape
    rng = np.random.default_rng(slots + group)
    query = 2 * rng.normal(size=(batch, window, kv_heads * group, head_dim))
    kv = rng.normal(size=(batch, kv_heads, slots, 2 * head_dim))
    key_positions = np.cumsum(rng.integers(1, 3, size=(batch, kv_heads, slots)), axis=-1) - 1
    key_positions = np.where(np.arange(slots) < lengths[..., None], key_positions, -1).astype(np.int32)
    kv[key_positions < 0] = np.nan
    query_positions = key_positions.max((1, 2))[:, None] + np.arange(1 - window, 1)
    query_positions = np.maximum(query_positions, -1).astype(np.int32)
    return *(jnp.asarray(x, dtype) for x in (query, kv)), jnp.asarray(query_positions), jnp.asarray(key_positions)


def expected(query, kv, query_positions, key_positions, *, excluded, kernel, pooling, group_reduce, reduce):
    """The scores, a query at a time."""
    query, kv = np.asarray(query, np.float64), np.asarray(kv, np.float64)
    query_positions, key_positions = np.asarray(query_positions), np.asarray(key_positions)
    group, head_dim = query.shape[2] // kv.shape[1], query.shape[3]
    over_group = {"mean": np.mean, "max": np.max}[group_reduce]
    scores = np.zeros(key_positions.shape)
    for row, head in np.ndindex(key_positions.shape[:2]):
        positions = key_positions[row, head]
        counted = max(0, (positions >= 0).sum() - excluded)
        voters = np.flatnonzero(query_positions[row] >= 0)
        attention = np.zeros((group, len(positions)))
        for member, voter in np.ndindex(group, len(voters)):
            seen = (positions >= 0) & (positions <= query_positions[row, voters[voter]])
            asks = query[row, voters[voter], head * group + member]
            weights = np.exp(kv[row, head, seen, :head_dim] @ asks / np.sqrt(head_dim))
            attention[member, seen] += weights / max(weights.sum(), 1e-30) / len(voters)
        attention = attention[:, :counted]
        if reduce == "before_pooling":
            attention = over_group(attention, axis=0, keepdims=True)
        pooled = np.zeros_like(attention)
        for token in range(counted):
            near = attention[:, max(0, token - kernel // 2) : token + kernel // 2 + 1]
            pooled[:, token] = near.max(1) if pooling == "max" else near.sum(1) / kernel
        scores[row, head, :counted] = over_group(pooled, axis=0)
    return scores


def assert_close(actual, wanted, dtype="float32"):
    actual = np.asarray(actual, np.float64)
    assert np.isfinite(actual).all()
    largest = (np.abs(actual - wanted) / np.maximum(np.abs(wanted), 1e-12)).max()
    assert largest <= LIMITS[dtype], f"the largest relative difference is {largest:.1e}"


# Heads without a token, with fewer than queries, and full.
LENGTHS = [[0, 1, 20], [60, 39, 8]]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    ("head_dim", "group", "window", "dtype"),
    [(64, 3, 1, "bfloat16"), (128, 8, 64, "float32")],
)
def test_every_token_scores_the_attention_that_it_gets(head_dim, group, window, dtype, implementation):
    arguments = case(LENGTHS, window=window, slots=60, group=group, head_dim=head_dim, dtype=dtype)
    result = attend(*arguments, **PLAIN, implementation=implementation)
    assert result.dtype == jnp.float32
    assert_close(result, expected(*arguments, **PLAIN), dtype)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": 7},
        {"kernel": 3, "group_reduce": "max", "reduce": "after_pooling"},
        {"kernel": 5, "pooling": "avg", "reduce": "after_pooling"},
        {"kernel": 7, "pooling": "avg", "group_reduce": "max"},
    ],
)
def test_scores_are_pooled_outside_the_excluded_tokens(settings, implementation):
    settings = PLAIN | {"excluded": 16} | settings
    arguments = case(LENGTHS, window=16, slots=60, group=3)
    result = attend(*arguments, **settings, implementation=implementation)
    assert_close(result, expected(*arguments, **settings))


def test_a_row_without_votes_scores_nothing():
    query, kv, query_positions, key_positions = case(LENGTHS, window=4, slots=60)
    result = attend(query, kv, jnp.full_like(query_positions, -1), key_positions, **PLAIN)
    np.testing.assert_array_equal(result, 0.0)


def test_no_matrix_of_all_heads_is_held():
    query_heads, kv_heads, window, slots = 32, 8, 32, 4096
    shapes = (
        jax.ShapeDtypeStruct((1, window, query_heads, 64), jnp.float32),
        jax.ShapeDtypeStruct((1, kv_heads, slots, 128), jnp.float32),
        jax.ShapeDtypeStruct((1, window), jnp.int32),
        jax.ShapeDtypeStruct((1, kv_heads, slots), jnp.int32),
    )
    memory = attend.lower(*shapes, **PLAIN, implementation="xla").compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < query_heads * window * slots * 4 / 3


RNG = np.random.default_rng(7)


@functools.cache
def ranks(kind: str) -> np.ndarray:
    """Scores of two rows and three heads, marked at both ends."""
    if kind == "distinct":
        return RNG.normal(size=(2, 3, 1500)).astype(np.float32)
    scores = RNG.integers(-2, 3, size=(2, 3, 1500)).astype(np.float32) / 4
    if kind == "odd":
        for value in (-0.0, 0.0, 1e-40, -1e-41, 1.2e-38, -1.2e-38, np.inf, np.nan):
            scores[RNG.random(scores.shape) < 0.08] = value
    if kind == "equal":
        scores[...] = 0.25
    scores[..., :4] = np.inf
    scores[..., 1400:] = -np.inf
    return scores


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("kind", ["distinct", "ties", "odd", "equal"])
def test_the_highest_are_chosen_and_of_equals_the_first(kind, implementation):
    scores, counts = ranks(kind), np.asarray([[400, 0, 1], [399, 4, 200]], np.int32)
    index, chosen = select(jnp.asarray(scores), jnp.asarray(counts), most=400, implementation=implementation)
    assert index.shape == chosen.shape == (2, 3, 400)
    assert index.dtype == jnp.int32
    # XLA compares subnormal numbers as zeros.
    scores = np.where(np.abs(scores) < 1.17e-38, 0.0, scores)
    for place in np.ndindex(2, 3):
        wanted = np.sort(np.argsort(-scores[place], kind="stable")[: counts[place]])
        np.testing.assert_array_equal(index[place][: counts[place]], wanted)
        np.testing.assert_array_equal(chosen[place], np.arange(400) < counts[place])
        np.testing.assert_array_equal(index[place][counts[place] :], 1499)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_no_more_is_chosen_than_there_is(implementation):
    scores = jnp.asarray([[[3.0, -jnp.inf, 1.0]]])
    index, chosen = select(scores, jnp.asarray([[2]]), most=7, implementation=implementation)
    np.testing.assert_array_equal(index, [[[0, 2, 2]]])
    np.testing.assert_array_equal(chosen, [[[True, True, False]]])


def test_first_and_last_tokens_stay_and_the_best_of_the_others():
    arguments = case(LENGTHS, window=8, slots=60)
    positions = np.asarray(arguments[3])
    settings = PLAIN | {"excluded": 8, "kernel": 3}
    scores = expected(*arguments, **settings)
    counts = np.minimum([[16, 16, 16], [16, 30, 16]], LENGTHS)
    index, chosen = choose(
        *arguments, jnp.asarray(counts, jnp.int32), most=30, sinks=3, recent=jnp.full((2, 3), 8), **settings
    )
    for place in np.ndindex(2, 3):
        length = LENGTHS[place[0]][place[1]]
        forced = {i for i in range(length) if positions[place][i] < 3 or i >= length - 8}
        others = sorted(set(range(length)) - forced, key=lambda i, s=scores[place]: (-s[i], i))
        wanted = sorted([*forced, *others[: max(0, counts[place] - len(forced))]])
        assert index[place][chosen[place]].tolist() == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": (2, 3, 50, 24)}, r"`kv` rows must hold key and value, 2 \* 16 wide, got 24"),
        ({"key_positions": (2, 3, 49)}, r"`query` .* and `key_positions` \[B, K, S\] must agree, got .* \(2, 3, 49\)"),
        ({"query_positions": (2, 5)}, r"must agree, got .* \(2, 5\) and"),
        ({"query": (2, 4, 4, 16)}, r"4 query heads do not group over 3 KV heads"),
        ({"kernel": 4}, r"`kernel` must be odd and positive, got 4"),
        ({"excluded": -1}, r"`excluded` must not be negative, got -1"),
        ({"implementation": "magic"}, r"`implementation` must be one of reference, xla, .* got 'magic'"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_says_which_argument_does_not_fit(change, message):
    shapes: dict[str, Any] = {"query": (2, 4, 6, 16), "kv": (2, 3, 50, 32), "query_positions": (2, 4)}
    shapes |= {"key_positions": (2, 3, 50)} | {name: size for name, size in change.items() if isinstance(size, tuple)}
    arrays = {name: jnp.zeros(shape, jnp.int32 if "positions" in name else "float32") for name, shape in shapes.items()}
    others = {name: value for name, value in change.items() if not isinstance(value, tuple)}
    with pytest.raises(ValueError, match=message):
        pooled_attention(**arrays, **others)


@pytest.mark.usefixtures("no_shape_checks")
def test_a_choice_says_which_argument_does_not_fit():
    scores = jnp.zeros((2, 3, 50))
    with pytest.raises(ValueError, match=r"`counts` \[B, K\] must agree, got \(2, 3, 50\) and \(2, 2\)"):
        select_highest(scores, jnp.zeros((2, 2), jnp.int32), most=4)
    with pytest.raises(ValueError, match=r"`most` must be at least 1, got 0"):
        select_highest(scores, jnp.zeros((2, 3), jnp.int32), most=0)
    with pytest.raises(ValueError, match=r"`implementation` must be one of .* got 'magic'"):
        select_highest(scores, jnp.zeros((2, 3), jnp.int32), most=4, implementation="magic")
