"""H2O: accumulated attention, against a cache that is a list of tokens and their scores."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import H2O

LENGTHS = np.asarray([41, 10])
BUDGET, SINKS, STEPS = 24, 2, 200


def rotated(x: np.ndarray) -> np.ndarray:
    """RoPE of [T, H, D] at positions 0, 1, 2, ..., as complex multiplication in float64."""
    x = x.astype(np.float64)
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half))[:, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


class HeavyHitters:
    """One KV head's tokens and what attention each has had, as the paper tells it."""

    def __init__(self, query, key, *, budget, recent, mean=False, sinks=SINKS):
        self.query, self.key = query, key  # [T, G, D] and [T, D]
        self.budget, self.recent, self.mean, self.sinks = budget, recent, mean, sinks
        self.scores: dict[int, float] = {}

    def read(self, start: int, end: int) -> None:
        """Several tokens at once: column sums of their whole attention matrix, then down to the budget."""
        keys = [*self.scores, *range(start, end)]
        logits = np.einsum("tgd,jd->gtj", self.query[start:end], self.key[keys]) / 4.0
        unseen = np.asarray(keys)[None] > np.arange(start, end)[:, None]
        weights = np.exp(np.where(unseen, -np.inf, logits - logits.max(-1, keepdims=True)))
        sums = (weights / weights.sum(-1, keepdims=True)).sum((0, 1))
        self.scores = {j: self.scores.get(j, 0.0) + float(s) for j, s in zip(keys, sums, strict=True)}
        while len(self.scores) > self.budget:
            self._drop(end - 1, self.recent)

    def step(self, token: int) -> None:
        """One token: all that are held, and it, get its attention; then the lowest goes, but never it itself."""
        self.scores[token] = 0.0
        held = list(self.scores)
        logits = self.key[held] @ self.query[token].T / 4.0
        weights = np.exp(logits - logits.max(0))
        for j, attention in zip(held, (weights / weights.sum(0)).sum(1), strict=True):
            self.scores[j] += float(attention)
        if len(self.scores) > self.budget:
            self._drop(token, max(self.recent, 1))

    def _drop(self, newest: int, recent: int) -> None:
        may_go = [j for j in self.scores if self.sinks <= j <= newest - recent]
        worth = {j: self.scores[j] / (newest - j + 1 if self.mean else 1) for j in may_go}
        del self.scores[min(worth, key=lambda j: worth[j])]


def lists(stream, **settings) -> list[list[HeavyHitters]]:
    """A list for every row and KV head."""
    group = stream.model.num_query_heads // stream.model.num_kv_heads
    rows = []
    for query, key in zip(stream.query, stream.key, strict=True):
        query, key = rotated(query), rotated(key)
        rows.append(
            [HeavyHitters(query[:, group * h : group * (h + 1)], key[:, h], **settings) for h in range(key.shape[1])]
        )
    return rows


def held(state: kvjax.LayerState, row: int, head: int) -> list[int]:
    positions = np.asarray(state.positions[row]).reshape(2, -1)[head]
    return sorted(positions[positions != kvjax.EMPTY].tolist())


def assert_same(state, wanted, step):
    for row in range(2):
        for head in range(2):
            assert held(state, row, head) == sorted(wanted[row][head].scores), (step, row, head)


SETTINGS = [("sum", None), ("sum", 6), ("mean", None), ("mean", 6), ("sum", 0)]


@pytest.mark.parametrize(("normalise", "recent"), SETTINGS)
def test_the_cache_is_the_list_at_every_step_and_turn(make_stream, normalise, recent):
    stream = make_stream(length=280)
    policy = H2O(budget=BUDGET, sinks=SINKS, recent_tokens=recent, normalise=normalise)
    wanted = lists(stream, budget=BUDGET, recent=BUDGET // 2 if recent is None else recent, mean=normalise == "mean")
    spec = stream.spec(policy, 41, 1)
    # The second row's prompt is shorter than the budget: nothing goes until it is full.
    _, state = stream.prefill(policy, spec, stream.positions(LENGTHS, 41))
    for row in range(2):
        for head in wanted[row]:
            head.read(0, int(LENGTHS[row]))
    assert_same(state, wanted, "prompt")
    assert held(state, 1, 0) == list(range(10))
    seen = LENGTHS
    for part in range(2):
        for step in range(STEPS if part == 0 else 20):
            _, state = stream.decode(policy, spec, state, jnp.asarray(seen, jnp.int32))
            for row in range(2):
                for head in wanted[row]:
                    head.step(int(seen[row]))
            assert_same(state, wanted, step)
            seen = seen + 1
        if part == 0:
            # A second turn: its queries' attention is added to what is remembered.
            added = np.asarray([7, 4])
            _, state = stream.extend(policy, spec, state, stream.positions(added, 7, start=seen))
            for row in range(2):
                for head in wanted[row]:
                    head.read(int(seen[row]), int(seen[row] + added[row]))
            assert_same(state, wanted, "turn")
            seen = seen + added
    scores = np.asarray(state.scores).reshape(2, 2, -1)
    positions = np.asarray(state.positions).reshape(2, 2, -1)
    for row in range(2):
        for head in range(2):
            remembered = [wanted[row][head].scores[j] for j in positions[row, head].tolist()]
            np.testing.assert_allclose(scores[row, head], remembered, rtol=1e-4, atol=1e-4)


HEAVY = (90, 150, 205)  # positions of planted tokens


@pytest.fixture(scope="module")
def after_many_steps(make_stream):
    """What the heads hold after 200 steps with so many recent tokens, and the share of tokens that outlived a step."""
    stream = make_stream(length=280)
    # Dimension 7 hardly turns; some tokens that are decoded have what every query looks for.
    query, key = stream.query.copy(), stream.key.copy()
    query[..., 7] = 4.0
    key[..., 7] = 0.0
    key[:, HEAVY, :, 7] = np.asarray([9.0, 12.0, 15.0])[:, None, None]
    stream = dataclasses.replace(stream, query=query, key=key)

    @functools.cache
    def run(recent):
        policy = H2O(budget=BUDGET, sinks=SINKS, recent_tokens=recent)
        spec = stream.spec(policy, 41, 1)
        lengths = np.asarray([41, 30])
        _, state = stream.prefill(policy, spec, stream.positions(lengths, 41))
        outlived, before = [], None
        for step in range(STEPS):
            _, state = stream.decode(policy, spec, state, jnp.asarray(lengths + step, jnp.int32))
            now = [(row, held(state, row, head)) for row in range(2) for head in range(2)]
            if before is not None:
                outlived += [lengths[row] + step - 1 in tokens for row, tokens in now]
            before = now
        assert before is not None
        return before, lengths, float(np.mean(outlived))

    return run


def test_the_cache_does_not_freeze_on_the_prompt(after_many_steps):
    """Broken by: no recent window; a decoded token's score is not carried on."""
    heads, lengths, outlived = after_many_steps(None)
    assert outlived == 1.0
    for row, tokens in heads:
        end = int(lengths[row]) + STEPS
        assert set(range(end - BUDGET // 2, end)) <= set(tokens)
        # Decoded, no longer recent, and still held: heavy hitters.
        assert set(HEAVY) <= set(tokens), tokens


def test_without_recent_tokens_new_ones_go_at_once(after_many_steps):
    """What the recent window is for: a new token's score is near 0."""
    heads, lengths, outlived = after_many_steps(0)
    assert outlived < 0.2
    for row, tokens in heads:
        assert len([t for t in tokens if t >= lengths[row] and t not in HEAVY]) <= 3, tokens


def test_presets_are_the_papers_and_kvpresss_settings():
    assert H2O.paper(budget=64) == H2O(budget=64, sinks=0, recent_tokens=None, normalise="sum", evict="decode")
    assert H2O.kvpress(compression_ratio=0.75) == H2O(
        budget=0.25, sinks=0, recent_tokens=0, normalise="mean", evict="prompt"
    )


def test_once_after_the_prompt_the_mean_is_over_the_queries_that_could_see_a_token(make_stream):
    stream = make_stream(length=280)
    policy = H2O.kvpress(compression_ratio=0.5)
    _, state = stream.prefill(policy, stream.spec(policy, 41, 1), stream.positions(LENGTHS, 41))
    for row, length in enumerate(map(int, LENGTHS)):
        for head in range(2):
            tokens = lists(stream, budget=length // 2, recent=0, mean=True, sinks=0)[row][head]
            tokens.read(0, length)
            assert held(state, row, head) == sorted(tokens.scores)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 7}, r"`budget` must be at least twice `sinks` = 8 tokens, got 7"),
        ({"budget": 9, "recent_tokens": 6}, r"at least `sinks` \+ `recent_tokens` = 10 tokens, got 9"),
        ({"budget": 4, "recent_tokens": 0}, r"at least `sinks` \+ 1 = 5 tokens, got 4"),
        ({"budget": 64, "recent_tokens": -1}, r"`recent_tokens` must not be negative, got -1"),
        ({"budget": 64, "normalise": "max"}, r'`normalise` must be "sum" or "mean", got \'max\''),
        ({"budget": 64, "evict": "always"}, r'`evict` must be "prompt" or "decode", got \'always\''),
        ({"budget": 64, "allocation": 3}, r"`allocation` must be one such as `kvjax.Pyramid\(\)`, got 3"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_rejects_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        H2O(**settings)
