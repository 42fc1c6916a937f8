"""SnapKV: its votes and its choice, against the paper's steps in NumPy."""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import SnapKV
from kvjax.attention import Asked
from kvjax.policies.base import prompt_rows

EMPTY = kvjax.EMPTY


def attention(stream, row: int, head: int, length: int, window: int) -> np.ndarray:
    """Causal attention [window, length] of a query head's last queries, in float64."""
    group = stream.model.num_query_heads // stream.model.num_kv_heads
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    turn = stream.model.rope.rotate
    query = np.asarray(turn(jnp.asarray(stream.query[row : row + 1, :length]), positions), np.float64)[0, :, head]
    key = np.asarray(turn(jnp.asarray(stream.key[row : row + 1, :length]), positions), np.float64)[0, :, head // group]
    scores = query[length - window :] @ key.T / np.sqrt(query.shape[-1])
    unseen = np.arange(length)[None] > np.arange(length - window, length)[:, None]
    weights = np.exp(np.where(unseen, -np.inf, scores))
    return weights / weights.sum(-1, keepdims=True)


def pooled(votes: np.ndarray, kernel: int, pooling: str) -> np.ndarray:
    result = np.zeros(len(votes))
    for j in range(len(votes)):
        inside = [votes[i] for i in range(j - kernel // 2, j + kernel // 2 + 1) if 0 <= i < len(votes)]
        result[j] = max(inside) if pooling == "max" else sum(inside) / kernel
    return result


def papers_scores(stream, policy: SnapKV, row: int, kv_head: int, length: int) -> np.ndarray:
    """Scores [length - window] of the tokens before the window."""
    group = stream.model.num_query_heads // stream.model.num_kv_heads
    votes = [
        attention(stream, row, kv_head * group + g, length, policy.window)[:, : length - policy.window].mean(0)
        for g in range(group)
    ]
    reduce = {"mean": np.mean, "max": np.max}[policy.group_reduce]
    if policy.group_order == "before_pooling":
        return pooled(reduce(votes, axis=0), policy.kernel, policy.pooling)
    return reduce([pooled(v, policy.kernel, policy.pooling) for v in votes], axis=0)


def papers_choice(scores: np.ndarray, policy: SnapKV, length: int, budget: int) -> list[int]:
    """Sinks, window, and the best of the others; of equals the first."""
    forced = [*range(policy.sinks), *range(length - policy.window, length)]
    others = sorted(range(policy.sinks, length - policy.window), key=lambda j: (-scores[j], j))
    return sorted(forced + others[: budget - len(forced)])


def held(spec: kvjax.LayerSpec, state: kvjax.LayerState, row: int, head: int) -> list[int]:
    start = spec.starts[head]
    positions = np.asarray(state.positions)[row, start : start + spec.slots[head]]
    return sorted(positions[positions != EMPTY].tolist())


LENGTHS = np.asarray([61, 40])
# Every pair of two settings' values comes up.
VARIANTS = [
    ("max", "mean", "before_pooling", 7, 4),
    ("max", "max", "before_pooling", 3, 0),
    ("max", "mean", "after_pooling", 3, 4),
    ("max", "max", "after_pooling", 7, 0),
    ("avg", "mean", "after_pooling", 7, 0),
    ("avg", "max", "before_pooling", 7, 4),
    ("avg", "max", "after_pooling", 3, 4),
    ("avg", "mean", "before_pooling", 3, 0),
    ("max", "mean", "before_pooling", 1, 0),
    ("avg", "max", "after_pooling", 1, 4),
]


@pytest.mark.parametrize(("pooling", "reduce", "order", "kernel", "sinks"), VARIANTS)
def test_votes_and_choice_are_the_papers(make_stream, pooling, reduce, order, kernel, sinks):
    stream = make_stream()
    policy = SnapKV(
        budget=20, window=8, kernel=kernel, pooling=pooling, group_reduce=reduce, group_order=order, sinks=sinks
    )
    positions = stream.positions(LENGTHS, 64)
    query, key, value = map(jnp.asarray, stream.take(positions))
    rope = stream.model.rope
    asked = Asked(
        query=rope.rotate(query, positions), unrotated=query, positions=positions, log_sum_exp=None, rope=rope
    )
    scores = np.asarray(policy.score(prompt_rows(rope.rotate(key, positions), value, positions), asked))
    spec = stream.spec(policy, 64, 4)
    _, state = stream.prefill(policy, spec, positions)
    for row, head in itertools.product(range(2), range(2)):
        length = int(LENGTHS[row])
        wanted = papers_scores(stream, policy, row, head, length)
        largest = np.abs(scores[row, head, : length - 8] - wanted).max()
        assert largest < 1e-6, f"the largest difference is {largest:.1e}"
        assert held(spec, state, row, head) == papers_choice(wanted, policy, length, 20)


def test_for_averages_of_means_the_order_makes_no_difference_and_for_maxima_it_does(make_stream):
    stream = make_stream()
    average = SnapKV(budget=20, window=8, pooling="avg")
    for policy, same in ((average, True), (dataclasses.replace(average, pooling="max"), False)):
        after = dataclasses.replace(policy, group_order="after_pooling")
        scores = [papers_scores(stream, p, 0, 1, 61) for p in (policy, after)]
        assert np.allclose(scores[0], scores[1]) == same


def test_short_prompts_are_kept_whole_and_one_token_too_many_costs_the_lowest(make_stream):
    stream = make_stream(rows=4)
    policy = SnapKV(budget=20, window=8, sinks=4)
    # As long as the window, shorter than the window, as long as the budget, and one token longer.
    lengths = np.asarray([8, 5, 20, 21])
    spec = stream.spec(policy, 21, 4)
    output, state = stream.prefill(policy, spec, stream.positions(lengths, 21))
    assert np.isfinite(output).all()
    for head in range(2):
        for row in range(3):
            assert held(spec, state, row, head) == list(range(lengths[row]))
        scores = papers_scores(stream, policy, 3, head, 21)
        wanted = papers_choice(scores, policy, 21, 20)
        assert held(spec, state, 3, head) == wanted
        (lost,) = set(range(21)) - set(wanted)
        assert scores[lost] == scores[4:].min()


def test_of_equal_scores_the_earlier_token_stays(make_stream):
    stream = make_stream()
    # Queries of zeros attend to everything alike.
    even = dataclasses.replace(stream, query=jnp.zeros_like(stream.query))
    policy = SnapKV(budget=20, window=8, sinks=0)
    spec = even.spec(policy, 64, 4)
    _, state = even.prefill(policy, spec, even.positions(LENGTHS, 64))
    for row, length in enumerate(map(int, LENGTHS)):
        assert held(spec, state, row, 1) == [*range(12), *range(length - 8, length)]


def test_the_budget_counts_sinks_and_window(make_stream):
    stream = make_stream()
    policy = SnapKV(budget=12, window=8, sinks=4)
    spec = stream.spec(policy, 64, 4)
    _, state = stream.prefill(policy, spec, stream.positions(LENGTHS, 64))
    for row, length in enumerate(map(int, LENGTHS)):
        assert held(spec, state, row, 0) == [*range(4), *range(length - 8, length)]


def test_a_later_turns_queries_vote_on_everything_that_is_left(make_stream):
    stream = make_stream()
    policy = SnapKV(budget=20, window=4, kernel=1, sinks=2)
    spec = stream.spec(policy, 80, 4)
    _, state = stream.prefill(policy, spec, stream.positions(LENGTHS, 64))
    added = np.asarray([9, 6])
    _, extended = stream.extend(policy, spec, state, stream.positions(added, 9, start=LENGTHS))
    for row in range(2):
        length = int(LENGTHS[row] + added[row])
        for head in range(2):
            left = [*held(spec, state, row, head), *range(LENGTHS[row], length)]
            votes = []
            for g in range(3):
                weights = attention(stream, row, 3 * head + g, length, 4)
                weights[:, [j for j in range(length) if j not in left]] = 0.0
                votes.append((weights / weights.sum(-1, keepdims=True)).mean(0))
            scores = np.mean(votes, axis=0)
            others = sorted((j for j in left if 2 <= j < length - 4), key=lambda j: -scores[j])
            assert held(spec, extended, row, head) == sorted([0, 1, *others[:14], *range(length - 4, length)])


def test_presets_are_the_papers_the_authors_and_kvpresss_settings():
    settings = {
        SnapKV(budget=64): (32, 7, "max", "mean", "before_pooling", 4),
        SnapKV.paper(budget=64): (32, 7, "max", "mean", "before_pooling", 0),
        SnapKV.authors(budget=64): (32, 5, "avg", "mean", "before_pooling", 0),
        SnapKV.kvpress(compression_ratio=0.25): (64, 5, "avg", "mean", "after_pooling", 0),
        SnapKV.kvpress(compression_ratio=0.25, window_size=16, kernel_size=7): (
            16,
            7,
            "avg",
            "mean",
            "after_pooling",
            0,
        ),
    }
    for policy, wanted in settings.items():
        p = policy
        assert (p.window, p.kernel, p.pooling, p.group_reduce, p.group_order, p.sinks) == wanted
    assert SnapKV.kvpress(compression_ratio=0.25).budget == 0.75


def test_a_fraction_of_a_prompt_shorter_than_sinks_and_window_is_an_error():
    policy = SnapKV(budget=0.5, window=8)
    policy.check_lengths(np.asarray([24, 25]))
    message = r"`budget` = 0.5 of the 23 tokens of row 1 is 11 tokens, under `sinks` \+ `window` = 12; give a larger"
    with pytest.raises(ValueError, match=message):
        policy.check_lengths(np.asarray([24, 23]))
    SnapKV(budget=12, window=8).check_lengths(np.asarray([1]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 0}, r"`budget` must be at least 1 token, got 0"),
        ({"budget": -1}, r"`budget` must be at least 1 token, got -1"),
        ({"budget": 35}, r"`budget` must be at least `sinks` \+ `window` = 36 tokens, got 35"),
        ({"budget": 64, "window": 64}, r"at least `sinks` \+ `window` = 68 tokens, got 64"),
        ({"budget": 1.5}, r"`budget` must be a number of tokens \(int\) or a fraction .* got 1.5"),
        ({"budget": 0.0}, r"got 0.0"),
        ({"budget": True}, r"`budget` must be a number of tokens .* got True"),
        ({"budget": None}, r"`budget` must be a number of tokens .* got None"),
        ({"budget": 64, "kernel": 4}, r"`kernel` must be odd and positive, got 4"),
        ({"budget": 64, "kernel": -1}, r"`kernel` must be odd and positive, got -1"),
        ({"budget": 64, "window": 0}, r"`window` must be at least 1 token, got 0"),
        ({"budget": 64, "sinks": -1}, r"`sinks` must not be negative, got -1"),
        ({"budget": 64, "pooling": "mean"}, r'`pooling` must be "max" or "avg", got \'mean\''),
        ({"budget": 64, "group_reduce": "sum"}, r'`group_reduce` must be "mean" or "max", got \'sum\''),
        ({"budget": 64, "group_order": "never"}, r'`group_order` must be "before_pooling" or "after_pooling"'),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_rejects_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        SnapKV(**settings)


@pytest.mark.usefixtures("no_shape_checks")
def test_a_numpy_integer_is_a_budget():
    budget: Any = np.int64(64)
    assert SnapKV(budget=budget) == SnapKV(budget=64)
    assert hash(SnapKV(budget=budget)) == hash(SnapKV(budget=64))
