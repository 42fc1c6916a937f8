"""What holds for any settings, lengths and prompts; a new policy is a line in `SETTINGS`."""

import inspect
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import kvjax

WIDTH, HEADS = 48, 2

few, allocations = st.integers(0, 12), st.sampled_from([kvjax.Uniform(), kvjax.Pyramid(), kvjax.Adaptive()])
scored = {"budget": st.one_of(st.integers(1, 64), st.floats(0.1, 0.98)), "sinks": few}
snapkv = {
    "window": st.integers(1, 24),
    "kernel": st.sampled_from([1, 5, 99]),
    "pooling": st.sampled_from(["max", "avg"]),
}
masks = {"prefill_mask": st.sampled_from(["dense", "streaming"])}

SETTINGS = {
    kvjax.Full: {},
    kvjax.StreamingLLM: {**scored, **masks, "positions": st.sampled_from(["cache", "absolute"])},
    kvjax.DuoAttention: {
        **masks,
        "sinks": few,
        "recent": st.integers(1, 24),
        "sparsity": st.sampled_from([0.0, 0.5, 1.0]),
    },
    kvjax.SnapKV: {**scored, **snapkv, "allocation": allocations},
    kvjax.PyramidKV: {**scored, **snapkv},
    kvjax.AdaKV: {**scored, **snapkv},
    kvjax.H2O: {**scored, "recent_tokens": st.one_of(st.none(), few), "evict": st.sampled_from(["prompt", "decode"])},
    kvjax.TOVA: {**scored, "recent_tokens": few},
    kvjax.Knorm: {**scored, "recent_tokens": few, "allocation": allocations},
    kvjax.ExpectedAttention: {**scored, "future": st.integers(1, 99)},
}
NEEDED = {kvjax.DuoAttention: {"pattern": kvjax.HeadPattern.of([[0.1, 0.9]])}}


def test_every_policy_is_here():
    exported = [getattr(kvjax, name) for name in kvjax.__all__]
    classes = {x for x in exported if inspect.isclass(x) and issubclass(x, kvjax.Policy)}
    assert {x for x in classes if not inspect.isabstract(x)} == set(SETTINGS)


def most(policy: kvjax.Policy, length: int) -> int:
    """Tokens that the heads may hold together of a prompt."""
    if isinstance(policy, kvjax.Full):
        return HEADS * length
    if isinstance(policy, kvjax.DuoAttention):
        ring = min(policy.sinks + policy.recent, length)
        return sum(ring if streams else length for streams in policy.streaming(0))
    budget = getattr(policy, "budget")  # noqa: B009
    return HEADS * (min(length, budget) if isinstance(budget, int) else int(length * budget))


@pytest.mark.parametrize("policy_class", SETTINGS, ids=lambda c: c.__name__)
@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_never_over_budget_and_never_without_a_token(make_stream, policy_class, data):
    lengths = np.asarray(data.draw(st.lists(st.integers(1, WIDTH), min_size=2, max_size=2), label="lengths"))
    chosen = data.draw(st.fixed_dictionaries(SETTINGS[policy_class]), label="settings")
    try:
        policy = policy_class(**chosen, **NEEDED.get(policy_class, {}))
        policy.check_lengths(lengths)
    except ValueError:
        reject()
    stream = make_stream()
    spec = stream.spec(policy, WIDTH, 1)
    output, state = stream.prefill(policy, spec, stream.positions(lengths, WIDTH))
    held, positions = np.asarray(state.lengths), np.asarray(state.positions)
    assert (held >= 1).all()
    assert (held.sum(-1) <= [most(policy, int(length)) for length in lengths]).all()
    assert (held.sum(-1) == (positions != kvjax.EMPTY).sum(-1)).all()
    assert (positions < lengths[:, None]).all()
    inside = np.arange(WIDTH) < lengths[:, None]
    assert np.isfinite(np.asarray(output)[inside]).all()


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (kvjax.SnapKV, {"window": 2.5}, "`window` must be an integer, got 2.5"),
        (kvjax.StreamingLLM, {"sinks": 1.5}, "`sinks` must be an integer, got 1.5"),
        (kvjax.StreamingLLM, {"sinks": True}, "`sinks` must be an integer, got True"),
        (kvjax.H2O, {"recent_tokens": 7.0}, "`recent_tokens` must be an integer, got 7.0"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_counts_of_tokens_are_integers(policy, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        policy(budget=64, **settings)
