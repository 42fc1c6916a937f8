"""TOVA, Knorm, Expected Attention, and SnapKV that goes on evicting: each against a list or a formula in NumPy."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import H2O, TOVA, ExpectedAttention, Knorm, SnapKV
from kvjax.attention import Asked
from kvjax.policies.base import prompt_rows

ANY: Any = "some"
LENGTHS = np.asarray([41, 30])
BUDGET, SINKS, GROUP = 20, 2, 3


def rotated(x: np.ndarray) -> np.ndarray:
    """RoPE of [T, H, D] at positions 0, 1, 2, ..., as complex multiplication in float64."""
    x = x.astype(np.float64)
    half = x.shape[-1] // 2
    turn = np.exp(1j * np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half))[:, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attention(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """What each key gets from each query [G, D] of a group: [G, S]."""
    logits = query @ keys.T / np.sqrt(query.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def held(state: kvjax.LayerState, row: int, head: int) -> list[int]:
    positions = np.asarray(state.positions[row]).reshape(2, -1)[head]
    return sorted(positions[positions != kvjax.EMPTY].tolist())


class Listed:
    """A KV head's tokens and their scores; a subclass says how a step changes them."""

    def __init__(self, query, key, *, recent):
        self.query, self.key, self.recent = query, key, recent  # [T, G, D] and [T, D]
        self.scores: dict[int, float] = {}

    def prompt(self, length: int) -> None:
        raise NotImplementedError

    def update(self, token: int) -> None:
        raise NotImplementedError

    def step(self, token: int) -> None:
        self.update(token)
        self.evict(token)

    def evict(self, newest: int) -> None:
        while len(self.scores) > BUDGET:
            may_go = [j for j in self.scores if SINKS <= j <= newest - self.recent]
            del self.scores[min(may_go, key=lambda j: self.scores[j])]

    def mean_attention(self, token: int) -> dict[int, float]:
        tokens = [*self.scores, *({token} - set(self.scores))]
        got = attention(self.query[token], self.key[tokens]).mean(0)
        return dict(zip(tokens, got.tolist(), strict=True))


class TOVAList(Listed):
    def prompt(self, length):
        self.scores = dict.fromkeys(range(length), 0.0)
        self.step(length - 1)

    def update(self, token):
        self.scores = self.mean_attention(token)


class KnormList(Listed):
    def prompt(self, length):
        for token in range(length):
            self.update(token)
        self.evict(length - 1)

    def update(self, token):
        self.scores[token] = -float(np.linalg.norm(self.key[token]))


class SnapKVList(Listed):
    """The mean of the window's votes (kernel 1), then an exponential average with the memory of a window."""

    def prompt(self, length):
        window = range(length - self.recent, length)
        votes = np.zeros(length)
        for asking in window:
            votes[: asking + 1] += attention(self.query[asking], self.key[: asking + 1]).mean(0) / self.recent
        self.scores = {j: 0.0 if j in window else float(votes[j]) for j in range(length)}
        self.evict(length - 1)

    def update(self, token):
        share = 1 / self.recent
        old = self.scores
        self.scores = {j: (1 - share) * old.get(j, 0.0) + share * a for j, a in self.mean_attention(token).items()}


EVICTING = {
    "tova": (TOVA(budget=BUDGET, sinks=SINKS), TOVAList, 8),
    "tova_paper_like": (TOVA(budget=BUDGET, sinks=SINKS, recent_tokens=1), TOVAList, 1),
    "knorm": (Knorm(budget=BUDGET, sinks=SINKS, evict="decode"), KnormList, 8),
    "snapkv": (SnapKV(budget=BUDGET, sinks=SINKS, window=6, kernel=1, evict="decode"), SnapKVList, 6),
}


@pytest.mark.parametrize("name", EVICTING)
def test_the_cache_is_the_list_at_every_step(make_stream, name):
    policy, listed, recent = EVICTING[name]
    stream = make_stream(length=160)
    spec = stream.spec(policy, 41, 1)
    _, state = stream.prefill(policy, spec, stream.positions(LENGTHS, 41))
    shape = state.kv.shape
    assert shape[1] == 2 * BUDGET
    lists = []
    for row, length in enumerate(map(int, LENGTHS)):
        query, key = rotated(stream.query[row]), rotated(stream.key[row])
        lists.append([listed(query[:, GROUP * h : GROUP * (h + 1)], key[:, h], recent=recent) for h in range(2)])
        for tokens in lists[row]:
            tokens.prompt(length)
    for step in range(101):
        for row in range(2):
            for head in range(2):
                assert held(state, row, head) == sorted(lists[row][head].scores), (step, row, head)
        _, state = stream.decode(policy, spec, state, jnp.asarray(LENGTHS + step, jnp.int32))
        for row, length in enumerate(map(int, LENGTHS)):
            for tokens in lists[row]:
                tokens.step(length + step)
    assert state.kv.shape == shape


@pytest.mark.parametrize("recent", [0, 8])
def test_knorm_keeps_the_smallest_keys(make_stream, recent):
    stream = make_stream(length=160)
    policy = Knorm(budget=BUDGET, sinks=SINKS, recent_tokens=recent)
    _, state = stream.prefill(policy, stream.spec(policy, 41, 1), stream.positions(LENGTHS, 41))
    for row, length in enumerate(map(int, LENGTHS)):
        for head in range(2):
            # Rotation changes no norm.
            norms = np.linalg.norm(stream.key[row, :length, head].astype(np.float64), axis=-1)
            forced = {*range(SINKS), *range(length - recent, length)}
            others = [j for j in np.argsort(norms).tolist() if j not in forced]
            assert held(state, row, head) == sorted([*forced, *others[: BUDGET - len(forced)]])


def test_tova_of_kvpress_is_one_set_for_all_heads(make_stream):
    stream = make_stream(length=160)
    policy = TOVA.kvpress(compression_ratio=0.5)
    _, state = stream.prefill(policy, stream.spec(policy, 41, 1), stream.positions(LENGTHS, 41))
    for row, length in enumerate(map(int, LENGTHS)):
        query, key = rotated(stream.query[row]), rotated(stream.key[row])
        got = np.mean(
            [attention(query[length - 1, 3 * h : 3 * h + 3], key[:length, h]).mean(0) for h in range(2)], axis=0
        )
        wanted = sorted([*np.argsort(-got[:-1])[: length // 2 - 1].tolist(), length - 1])
        assert held(state, row, 0) == held(state, row, 1) == wanted


def rotation(position: int, head_dim: int = 16) -> np.ndarray:
    """The matrix that turns a column vector to a position."""
    half = head_dim // 2
    angle = position * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.diag(np.cos(angle)), np.diag(np.sin(angle))
    return np.block([[cos, -sin], [sin, cos]])


def expected_attention(stream, row: int, head: int, tokens: list[int], queries: range) -> np.ndarray:
    """The formula's score of each of `tokens` (the first 4 are sinks) for the 512 positions after `queries`."""
    average = np.mean([rotation(queries.stop + ahead) for ahead in range(512)], axis=0)
    key = rotated(stream.key[row])[tokens, head]
    shares = []
    for g in range(GROUP):
        asked = stream.query[row, max(queries.start, 4) : queries.stop, GROUP * head + g].astype(np.float64)
        mean = asked.mean(0)
        covariance = (asked - mean).T @ (asked - mean) / len(asked)
        mean, covariance = average @ mean, average @ covariance @ average.T
        logits = key @ mean / np.sqrt(16) + np.einsum("jd,de,je->j", key, covariance, key) / (2 * 16)
        weights = np.exp(logits[4:] - logits[4:].max())
        shares.append(np.append(np.zeros(4), weights / weights.sum()))
    return np.mean(shares, axis=0) * np.linalg.norm(stream.value[row, tokens, head].astype(np.float64), axis=-1)


def best_of(tokens: list[int], scores: np.ndarray) -> list[int]:
    """The sinks, and the highest of the others."""
    best = np.argsort(-scores[4:])[: BUDGET - 4] + 4
    return sorted([0, 1, 2, 3, *(tokens[j] for j in best)])


def test_expected_attention_is_the_formula(make_stream):
    stream = make_stream(length=160)
    policy = ExpectedAttention(budget=BUDGET)
    positions = stream.positions(LENGTHS, 41)
    query, key, value = stream.take(positions)
    turned, key = (stream.model.rope.rotate(x, positions) for x in (query, key))
    asked = Asked(turned, query, positions, None, stream.model.rope)
    scores = np.asarray(policy.score(prompt_rows(key, value, positions), asked))
    _, state = stream.prefill(policy, stream.spec(policy, 41, 1), positions)
    for row, length in enumerate(map(int, LENGTHS)):
        for head in range(2):
            tokens = list(range(length))
            wanted = expected_attention(stream, row, head, tokens, range(length))
            np.testing.assert_allclose(scores[row, head, 4:length], wanted[4:], rtol=2e-3, atol=1e-6)
            assert held(state, row, head) == best_of(tokens, wanted)


def test_a_later_turn_expects_from_its_own_queries(make_stream):
    stream = make_stream(length=160)
    policy = ExpectedAttention(budget=BUDGET)
    spec = stream.spec(policy, 41, 1)
    _, before = stream.prefill(policy, spec, stream.positions(LENGTHS, 41))
    added = np.asarray([20, 12])
    _, state = stream.extend(policy, spec, before, stream.positions(added, 20, start=LENGTHS))
    for row, length in enumerate(map(int, LENGTHS)):
        end = length + int(added[row])
        for head in range(2):
            left = [*held(before, row, head), *range(length, end)]
            scores = expected_attention(stream, row, head, left, range(length, end))
            assert held(state, row, head) == best_of(left, scores)


def test_it_cannot_expect_from_one_query():
    message = (
        r'ExpectedAttention cannot have `evict="decode"`: it expects from the mean of many queries, and a step has one'
    )
    with pytest.raises(ValueError, match=message):
        ExpectedAttention(budget=64, evict="decode")


@pytest.mark.parametrize("policy", [H2O, TOVA])
def test_every_layer_of_a_pyramid_evicts_at_its_own_size(make_stream, policy):
    """Four layers' specs, each driven by the same stream: a cache of each layer's share, full or not at first."""
    stream = make_stream(length=160)
    pyramid = policy(budget=32, sinks=2, recent_tokens=8, allocation=kvjax.Pyramid(beta=4))
    model = kvjax.ModelSpec(**{**vars(stream.model), "num_layers": 4})
    # Outside 10 tokens the mean is 22: 38.5, 27.5, 16.5, 5.5; of the halves the first two layers' are rounded up.
    wanted = [49, 38, 26, 15]
    specs = pyramid.layer_specs(model, 41, 1)
    assert [spec.kept[0] for spec in specs] == wanted
    assert [spec.slots for spec in specs] == [(count, count) for count in wanted]
    for spec, budget in zip((specs[0], specs[3]), (wanted[0], wanted[3]), strict=True):
        _, state = stream.prefill(pyramid, spec, stream.positions(LENGTHS, 41))
        assert state.lengths.tolist() == [[min(budget, n)] * 2 for n in LENGTHS.tolist()]
        for step in range(25):
            _, state = stream.decode(pyramid, spec, state, jnp.asarray(LENGTHS + step, jnp.int32))
            assert state.lengths.tolist() == [[min(budget, n + step + 1)] * 2 for n in LENGTHS.tolist()]
            for row, end in enumerate(map(int, LENGTHS + step + 1)):
                assert {0, 1, *range(end - 8, end)} <= set(held(state, row, 0))


def test_presets_are_the_papers_and_kvpresss_settings():
    assert TOVA.paper(budget=64) == TOVA(budget=64, sinks=0, recent_tokens=1)
    assert TOVA.kvpress(compression_ratio=0.75) == TOVA(
        budget=0.25, sinks=0, recent_tokens=1, heads="all", evict="prompt"
    )
    assert Knorm.kvpress(compression_ratio=0.75) == Knorm(budget=0.25, sinks=0, recent_tokens=0)
    assert ExpectedAttention.kvpress(compression_ratio=0.75, n_future_positions=64, n_sink=2) == ExpectedAttention(
        budget=0.25, future=64, sinks=2
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TOVA(budget=64, recent_tokens=-1), r"`recent_tokens` must not be negative, got -1"),
        (lambda: TOVA(budget=64, heads=ANY), r'`heads` must be "kv_head" or "all", got \'some\''),
        (lambda: TOVA(budget=64, heads="all"), r'`heads="all"` cannot have `evict="decode"`: KV heads hold'),
        (lambda: TOVA(budget=11), r"`budget` must be at least `sinks` \+ `recent_tokens` = 12 tokens, got 11"),
        (lambda: TOVA(budget=4, recent_tokens=0), r"`budget` must be at least `sinks` \+ 1 = 5 tokens, got 4"),
        (lambda: Knorm(budget=64, recent_tokens=-1), r"`recent_tokens` must not be negative, got -1"),
        (lambda: Knorm(budget=4, recent_tokens=0, evict="decode"), r"at least `sinks` \+ 1 = 5 tokens, got 4"),
        (lambda: ExpectedAttention(budget=64, future=0), r"`future` must be at least 1 position, got 0"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_rejects_settings_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [TOVA, Knorm, H2O])
def test_a_step_never_evicts_a_sink(make_stream, make):
    """Broken by: a budget of sinks alone, where every token that may go is the one that just came."""
    stream = make_stream(length=160)
    policy = make(budget=SINKS + 1, sinks=SINKS, recent_tokens=0, evict="decode")
    spec = stream.spec(policy, 41, 1)
    _, state = stream.prefill(policy, spec, stream.positions(LENGTHS, 41))
    for step in range(3):
        _, state = stream.decode(policy, spec, state, jnp.asarray(LENGTHS + step, jnp.int32))
        for row in range(2):
            assert held(state, row, 0) == [0, 1, int(LENGTHS[row]) + step]
