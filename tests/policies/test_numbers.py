"""Numbers: those that settings take, and JAX's own settings of them, which change nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import H2O, TOVA, DuoAttention, ExpectedAttention, Knorm, PyramidKV, SnapKV, StreamingLLM

PATTERN = kvjax.HeadPattern.of([[0.1, 0.9]])
# A policy with a Python number in every field that takes one.
COUNTED = [
    StreamingLLM(budget=16, sinks=2, window=14),
    StreamingLLM(window=14),
    H2O(budget=16, sinks=2, recent_tokens=5),
    SnapKV(budget=16, sinks=1, window=4, kernel=3),
    PyramidKV(budget=16, sinks=1, window=4, kernel=3),
    kvjax.AdaKV(budget=16, sinks=1, window=4, kernel=3),
    TOVA(budget=16, sinks=2, recent_tokens=5),
    Knorm(budget=16, sinks=2, recent_tokens=5),
    ExpectedAttention(budget=16, sinks=2, future=9),
    DuoAttention(pattern=PATTERN, sparsity=0.5, sinks=4, recent=12),
    DuoAttention(pattern=PATTERN, threshold=1, sinks=4, recent=12),
    H2O(budget=0.25, sinks=2),
]


def numbers(policy: kvjax.Policy) -> dict[str, int | float]:
    fields = dataclasses.fields(policy)  # pyright: ignore[reportArgumentType]
    values = {field.name: getattr(policy, field.name) for field in fields}
    return {name: value for name, value in values.items() if type(value) in (int, float)}


@pytest.mark.parametrize("policy", COUNTED, ids=lambda policy: type(policy).__name__)
@pytest.mark.usefixtures("no_shape_checks")
def test_numpys_numbers_are_stored_as_pythons(policy):
    """Broken by: `StreamingLLM(window=np.int64(14))`, whose budget was then taken for a fraction."""
    for kinds in ((np.int64, np.float64), (np.uint8, np.float32)):
        changed = {name: kinds[type(value) is float](value) for name, value in numbers(policy).items()}
        same = dataclasses.replace(policy, **changed)
        assert same == policy
        assert hash(same) == hash(policy)
        assert repr(same) == repr(policy)
        assert numbers(same) == numbers(policy)


@pytest.mark.parametrize("policy", COUNTED, ids=lambda policy: type(policy).__name__)
@pytest.mark.usefixtures("no_shape_checks")
def test_a_number_is_finite_and_neither_a_boolean_nor_a_text(policy):
    for name in numbers(policy):
        for wrong in (True, np.True_, float("nan"), float("inf"), -float("inf"), "3", [3], 1j):
            with pytest.raises(ValueError, match=f"`{name}` must be"):
                dataclasses.replace(policy, **{name: wrong})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoudValues(kvjax.ScoredPolicy):
    """A policy without a step."""

    def score(self, rows, asked):
        return jnp.linalg.norm(rows.value, axis=-1)


def test_a_policy_without_a_step_cannot_evict_while_decoding():
    assert LoudValues(budget=8).evict == "prompt"
    with pytest.raises(ValueError, match=r'LoudValues cannot have `evict="decode"`: it has no `step`'):
        LoudValues(budget=8, evict="decode")


def test_kept_tokens_of_any_range_of_lengths(make_stream):
    model = dataclasses.replace(make_stream().model, num_layers=3)
    for policy in (PyramidKV(budget=64), PyramidKV.authors(budget=64), H2O(budget=64), H2O(budget=0.1, sinks=1)):
        far = policy.kept_tokens(model, range(5000, 5001))
        assert far == policy.kept_tokens(model, range(4999, 5001))
        assert sum(heads[0] for heads in far) >= 3 * 64


#: Those of the contract suite whose programs run under other settings too; the others are traced.
EXECUTED = [
    H2O(budget=16, sinks=2),
    SnapKV(budget=16, window=4, kernel=3, evict="decode"),
]
ONLY_TRACED = [
    kvjax.Full(),
    StreamingLLM(budget=0.5, positions="absolute"),
    StreamingLLM(budget=16, prefill_mask="streaming"),
    H2O.kvpress(compression_ratio=0.5),
    H2O(budget=16, sinks=2, normalise="mean", allocation=kvjax.Pyramid()),
    SnapKV.kvpress(compression_ratio=0.5, window_size=4),
    PyramidKV(budget=0.5, window=4, sinks=1),
    TOVA(budget=16),
    TOVA.kvpress(compression_ratio=0.5),
    Knorm(budget=16),
    Knorm(budget=16, evict="decode"),
    ExpectedAttention(budget=16),
    kvjax.AdaKV(budget=16, window=4),
    kvjax.AdaKV.over(ExpectedAttention(budget=0.5)),
    DuoAttention(pattern=PATTERN, sparsity=0.5, sinks=4, recent=12),
    DuoAttention(pattern=PATTERN, sparsity=0.5, sinks=4, recent=12, prefill_mask="streaming"),
]
LENGTHS, ADDED = np.asarray([41, 26]), np.asarray([6, 11])


def conversation(stream, policy: kvjax.Policy):
    """The outputs and states of a prompt, a second turn and three decoded tokens."""
    spec, later = stream.spec(policy, 48, 24), stream.spec(policy, 64, 24)
    prompt = stream.positions(LENGTHS, 48)
    output, state = stream.prefill(policy, spec, prompt)
    yield jnp.where((prompt >= 0)[..., None, None], output, 0.0), state
    turn = stream.positions(ADDED, 11, start=LENGTHS)
    output, state = stream.extend(policy, later, state, turn, held_spec=spec)
    yield jnp.where((turn >= 0)[..., None, None], output, 0.0), state
    for step in range(3):
        output, state = stream.decode(policy, later, state, jnp.asarray(LENGTHS + ADDED + step, jnp.int32))
        yield output, state


@pytest.mark.parametrize("policy", EXECUTED, ids=lambda policy: type(policy).__name__)
def test_64_bits_and_the_search_for_nan_change_nothing(make_stream, policy):
    stream = make_stream()
    expected = list(conversation(stream, policy))
    with jax.enable_x64(True), jax.debug_nans(True):
        given = list(conversation(stream, policy))
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(given), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", EXECUTED + ONLY_TRACED, ids=lambda policy: type(policy).__name__)
def test_shapes_and_dtypes_are_the_same_under_64_bits(make_stream, traced, policy):
    """Strict promotion (conftest's) refuses whatever mixes 32 and 64 bits."""
    model = make_stream().model
    expected = [results for _, results in traced(policy, model, 48)]
    with jax.enable_x64(True):
        assert [results for _, results in traced(policy, model, 48)] == expected
