"""One prefill for many policies gives each the cache that a prefill of its own gives."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.evaluation import shared_prefill
from kvjax.evaluation.continuing import extended, greedy_answers, last_logits
from kvjax.prompts import batch_of
from kvjax.state import by_head

PATTERN = kvjax.HeadPattern.of([[0.9, 0.1], [0.2, 0.8]])
POLICIES = {
    "Full": kvjax.Full(),
    "StreamingLLM": kvjax.StreamingLLM(budget=24),
    "H2O": kvjax.H2O(budget=24),
    "H2O, fewer": kvjax.H2O(budget=16),
    "SnapKV": kvjax.SnapKV(budget=24, window=8),
    "SnapKV, a share": kvjax.SnapKV(budget=0.5, window=8),
    "PyramidKV": kvjax.PyramidKV(budget=24, window=8),
    "AdaKV": kvjax.AdaKV(budget=24, window=8),
    "TOVA": kvjax.TOVA(budget=24),
    "Knorm": kvjax.Knorm(budget=24),
    "ExpectedAttention": kvjax.ExpectedAttention(budget=24),
    "DuoAttention": kvjax.DuoAttention(pattern=PATTERN, sparsity=0.5, sinks=4, recent=12),
}
LENGTHS, PREFIXES, ROOM = (64, 57), (50, 49), 5


def rows(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 100, length) for length in lengths]


@pytest.fixture(scope="module")
def shared(small):
    policies = list(POLICIES.values())
    made = shared_prefill(
        *(small, rows(LENGTHS)),
        policies=policies,
        prefix_lengths=PREFIXES,
        prefix_policies=policies,
        max_new_tokens=ROOM,
    )
    caches = dict(zip(POLICIES, made.caches, strict=True))
    return made.logits, caches, dict(zip(POLICIES, made.prefix_caches, strict=True))


def assert_same(one: kvjax.Cache, other: kvjax.Cache) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for spec, mine, theirs in zip(one.specs, one.layers, other.layers, strict=True):
        # What empty slots hold does not matter.
        held = [jax.tree.leaves((by_head(state, spec), state.lengths)) for state in (mine, theirs)]
        for leaf, expected in zip(*held, strict=True):
            np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_gives_the_cache_of_a_prefill_of_its_own(small, shared, name):
    logits, caches, prefix_caches = shared
    tokens = rows(LENGTHS)
    alone, cache = kvjax.prefill(small, tokens, policy=POLICIES[name], max_new_tokens=ROOM)
    np.testing.assert_allclose(logits, alone, rtol=1e-4, atol=1e-4)
    assert_same(caches[name], cache)
    # Padded as the rows are, so that the shapes are the same; a shorter one would be another shape of the same tokens.
    prefixes = [row[:length] for row, length in zip(tokens, PREFIXES, strict=True)]
    _, cache = kvjax.prefill(small, prefixes, policy=POLICIES[name], max_new_tokens=ROOM)
    assert_same(prefix_caches[name], cache)


@pytest.mark.parametrize("name", ["Full", "H2O", "PyramidKV", "AdaKV", "DuoAttention"])
def test_goes_on_as_extend_does(small, shared, name):
    cache = shared[2][name]
    further = rows((14, 8), seed=1)
    logits, expected = kvjax.extend(small, cache, further)
    batch = batch_of(further)
    hidden, mine = extended(small, cache, batch)
    np.testing.assert_allclose(last_logits(small, hidden, batch.lengths), logits, rtol=1e-4, atol=1e-4)
    assert_same(mine, expected)


def test_answers_as_generate_does(small, shared):
    logits, caches, _ = shared
    result = kvjax.generate(small, rows(LENGTHS), policy=POLICIES["SnapKV"], max_new_tokens=ROOM, stop_tokens=())
    answers = greedy_answers(small, logits, caches["SnapKV"], limits=np.asarray([ROOM, 2]), stops=())
    assert answers == [result.tokens[0].tolist(), result.tokens[1][:2].tolist()]
    stop = int(result.tokens[0][3])
    first = result.tokens[0].tolist().index(stop)
    answers = greedy_answers(small, logits, caches["SnapKV"], limits=np.asarray([ROOM, 1]), stops=(stop,))
    assert answers[0] == result.tokens[0][:first].tolist()


def test_scores_once_what_several_budgets_share(small, monkeypatch):
    traced = []
    score = kvjax.Knorm.score
    monkeypatch.setattr(kvjax.Knorm, "score", lambda *args: traced.append(1) or score(*args))
    policies = [kvjax.Knorm(budget=b, recent_tokens=3) for b in (20, 30, 40)]
    shared_prefill(small, rows(LENGTHS), policies=policies, max_new_tokens=1)
    assert len(traced) == 1


class OwnAttention(kvjax.SnapKV):
    def attend_prompt(self, *arrays, **settings):
        return super().attend_prompt(*arrays, **settings)


@pytest.mark.parametrize(
    "policy",
    [
        OwnAttention(budget=24, window=8),
        kvjax.StreamingLLM(budget=24, prefill_mask="streaming"),
        kvjax.DuoAttention(pattern=PATTERN, prefill_mask="streaming"),
    ],
)
def test_refuses_policies_with_a_prompt_attention_of_their_own(small, policy):
    with pytest.raises(ValueError, match="must attend to a prompt in full to share its prefill"):
        shared_prefill(small, rows(LENGTHS), policies=[policy], max_new_tokens=1)


def test_refuses_prefixes_that_are_none(small):
    with pytest.raises(ValueError, match="`prefix_lengths` must be from 1 to the length of each row"):
        shared_prefill(small, rows(LENGTHS), policies=[], prefix_lengths=[65, 1], max_new_tokens=1)
