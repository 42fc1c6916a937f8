"""What every policy must do. A new policy is a row in `POLICIES`, not a test."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.state import capacities, segment_starts

BUDGET = 16


def cache_places(kept: np.ndarray, position: int) -> np.ndarray:
    """Places in the cache: 0, 1, 2, ... in order of position, the query last."""
    return np.arange(len(kept) + 1)


def same_for_all_heads(budget: int, length: int) -> tuple[int, int]:
    """What both heads hold."""
    return min(budget, length), min(budget, length)


@dataclasses.dataclass(frozen=True)
class Case:
    """A policy under test.

    Attributes:
        make: the policy for a budget.
        evicts: whether decoding keeps the cache at its size.
        places: positions that kept keys, and the query behind them, are rotated to; None for absolute ones.
        held: tokens that the two heads hold of a prompt.
        recent: last tokens that are never evicted.
        fractions: whether the budget may be one.
        unbounded: whether some heads keep all.
    """

    make: Callable[[int | float], kvjax.Policy]
    evicts: bool = False
    places: Callable[[np.ndarray, int], np.ndarray] | None = None
    held: Callable[[int, int], tuple[int, int]] = same_for_all_heads
    recent: int = 4
    fractions: bool = True
    unbounded: bool = False


def kvpress_like(policy: kvjax.ScoredPolicy, budget: int | float) -> kvjax.Policy:
    return dataclasses.replace(policy, budget=budget)


def duo(budget: int | float, prefill_mask: Literal["dense", "streaming"] = "dense") -> kvjax.Policy:
    assert isinstance(budget, int)
    pattern = kvjax.HeadPattern.of([[0.1, 0.9]])
    return kvjax.DuoAttention(pattern=pattern, sparsity=0.5, sinks=4, recent=budget - 4, prefill_mask=prefill_mask)


def duo_held(budget: int, length: int) -> tuple[int, int]:
    return min(budget, length), length


SNAPKV: dict[str, Any] = {"window": 4, "kernel": 3}
POLICIES = {
    "full": Case(lambda b: kvjax.Full(), held=lambda b, n: (n, n), fractions=False, unbounded=True),
    "streaming_llm": Case(lambda b: kvjax.StreamingLLM(budget=b), True, cache_places),
    "streaming_llm_no_sinks": Case(lambda b: kvjax.StreamingLLM(budget=b, sinks=0), True, cache_places),
    "streaming_llm_absolute": Case(lambda b: kvjax.StreamingLLM(budget=b, positions="absolute"), True),
    "streaming_llm_masked": Case(
        lambda b: kvjax.StreamingLLM(budget=b, prefill_mask="streaming"), True, cache_places, fractions=False
    ),
    "h2o": Case(lambda b: kvjax.H2O(budget=b, sinks=2), True),
    "h2o_mean": Case(lambda b: kvjax.H2O(budget=b, sinks=2, recent_tokens=5, normalise="mean"), True),
    "h2o_kvpress": Case(lambda b: kvpress_like(kvjax.H2O.kvpress(compression_ratio=0.5), b), recent=0),
    "h2o_pyramid": Case(lambda b: kvjax.H2O(budget=b, sinks=2, allocation=kvjax.Pyramid()), True),
    "snapkv": Case(lambda b: kvjax.SnapKV(budget=b, **SNAPKV)),
    "snapkv_kvpress": Case(lambda b: kvpress_like(kvjax.SnapKV.kvpress(compression_ratio=0.5, window_size=4), b)),
    "snapkv_max": Case(lambda b: kvjax.SnapKV(budget=b, **SNAPKV, group_reduce="max", sinks=2)),
    "snapkv_evicting": Case(lambda b: kvjax.SnapKV(budget=b, **SNAPKV, evict="decode"), True),
    "pyramidkv": Case(lambda b: kvjax.PyramidKV(budget=b, **SNAPKV)),
    "tova": Case(lambda b: kvjax.TOVA(budget=b), True),
    "tova_kvpress": Case(lambda b: kvpress_like(kvjax.TOVA.kvpress(compression_ratio=0.5), b), recent=1),
    "knorm": Case(lambda b: kvjax.Knorm(budget=b)),
    "knorm_evicting": Case(lambda b: kvjax.Knorm(budget=b, evict="decode"), True),
    "expected_attention": Case(lambda b: kvjax.ExpectedAttention(budget=b, future=16), recent=0),
    "ada_kv": Case(lambda b: kvjax.AdaKV(budget=b, **SNAPKV)),
    "ada_h2o": Case(lambda b: kvjax.AdaKV.over(kvjax.H2O(budget=b, sinks=2, evict="prompt"))),
    "duo": Case(duo, held=duo_held, fractions=False, unbounded=True),
    "duo_masked": Case(lambda b: duo(b, "streaming"), held=duo_held, fractions=False, unbounded=True),
}
# Each policy with the stream that the other tests use, and with one more in turn; some with all.
GROUPS_AND_DTYPES = [(3, "float32"), (1, "bfloat16"), (4, "float32"), (8, "bfloat16")]
ALL_GROUPS = ("streaming_llm", "h2o", "snapkv")
COMBINATIONS = [
    (name, *pair)
    for number, name in enumerate(POLICIES)
    for index, pair in enumerate(GROUPS_AND_DTYPES)
    if name in ALL_GROUPS or index in (0, 1 + number % 3)
]
every_combination = pytest.mark.parametrize(("case", "group", "dtype"), COMBINATIONS, indirect=["case"])
STEPS = 24
LENGTHS = np.asarray([41, 26])
WIDTH = 48


# Of the module, so that all tests of a policy come together: they share its compiled programs.
@pytest.fixture(params=POLICIES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return POLICIES[request.param]


@pytest.fixture
def policy(case: Case) -> kvjax.Policy:
    return case.make(BUDGET)


def kept(spec: kvjax.LayerSpec, state: kvjax.LayerState, row: int, head: int) -> np.ndarray:
    segment = segment_of(spec, state, row, head)
    return np.sort(segment[segment != kvjax.EMPTY])


def segment_of(spec: kvjax.LayerSpec, state: kvjax.LayerState, row: int, head: int) -> np.ndarray:
    """The positions in all slots of a head."""
    start, slots = (int(f(state, spec)[row, head]) for f in (segment_starts, capacities))
    return np.asarray(state.positions)[row, start : start + slots]


def assert_close(actual: jax.typing.ArrayLike, expected: jax.typing.ArrayLike, dtype: str = "float32") -> None:
    limit = 2e-5 if dtype == "float32" else 3e-2
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=limit, atol=limit)


def rows_after_prefill(stream, policy, new=STEPS):
    spec = stream.spec(policy, WIDTH, new)
    output, state = stream.prefill(policy, spec, stream.positions(LENGTHS, WIDTH))
    return spec, output, state


@every_combination
def test_every_step_equals_masked_dense_attention(case, policy, make_stream, group, dtype):
    stream = make_stream(group=group, dtype=dtype)
    spec, _, state = rows_after_prefill(stream, policy)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for step in range(STEPS):
        before = state
        positions = jnp.asarray(LENGTHS + step, jnp.int32)
        output, state = stream.decode(policy, spec, state, positions)
        # Shapes and dtypes never change.
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes
        assert output.dtype == jnp.dtype(dtype)
        if step % 5 and step != STEPS - 1:
            continue
        output = np.asarray(output)
        for row in range(2):
            for head in range(stream.model.num_query_heads):
                position = int(LENGTHS[row]) + step
                held = kept(spec, before, row, head // group)
                seen = np.append(held, position)
                # The token that asks is among the keys, at the query's own place.
                places = seen if case.places is None else case.places(held, position)
                expected = stream.expected(row, head, position, seen, np.append(places, places[-1]))
                assert_close(output[row, head], expected, dtype)


@every_combination
def test_equals_full_attention_under_budget(case, make_stream, group, dtype):
    stream = make_stream(group=group, dtype=dtype)
    policy = case.make(WIDTH + STEPS)
    spec, output, state = rows_after_prefill(stream, policy)
    full_spec, full_output, full_state = rows_after_prefill(stream, kvjax.Full())
    held = np.arange(WIDTH)[None] < LENGTHS[:, None]
    assert_close(output[held], full_output[held], dtype)
    for step in range(4):
        positions = jnp.asarray(LENGTHS + step, jnp.int32)
        output, state = stream.decode(policy, spec, state, positions)
        full_output, full_state = stream.decode(kvjax.Full(), full_spec, full_state, positions)
        assert_close(output, full_output, dtype)


def test_the_prompt_sees_full_attention(case, policy, make_stream):
    stream = make_stream()
    _, output, _ = rows_after_prefill(stream, policy)
    if getattr(policy, "prefill_mask", "dense") == "streaming":
        pytest.skip("its prompt sees what decoding would: test_streaming_llm.py, test_duo_attention.py")
    for row, position in ((0, 0), (0, 40), (1, 25)):
        for head in range(stream.model.num_query_heads):
            expected = stream.expected(row, head, position, np.arange(position + 1))
            assert_close(output[row, position, head], expected)


def test_keeps_its_budget_to_the_token_and_the_byte(case, policy, make_stream):
    stream = make_stream()
    spec, _, state = rows_after_prefill(stream, policy)
    expected = np.asarray([case.held(BUDGET, length) for length in LENGTHS])
    held = np.asarray(state.lengths)
    if spec.shared:
        # Heads may differ; their total may not.
        held, expected = held.sum(1), expected.sum(1)
    np.testing.assert_array_equal(held, expected)
    room = 0 if case.evicts else STEPS
    slots = 2 * (BUDGET + room)
    if case.unbounded:
        slots = sum(count + (STEPS if count == WIDTH else 0) for count in case.held(BUDGET, WIDTH))
    kv_heads, head_dim = stream.model.num_kv_heads, stream.model.head_dim
    # kv rows in float32, one int32 position a slot, one int32 length a head.
    by_hand = 2 * (slots * (2 * head_dim * 4 + 4) + kv_heads * 4)
    if state.scores is not None:
        by_hand += 2 * slots * 4
    if spec.shared:
        by_hand += 2 * kv_heads * 4
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == by_hand
    for step in range(STEPS):
        _, state = stream.decode(policy, spec, state, jnp.asarray(LENGTHS + step, jnp.int32))
        assert (np.asarray(state.lengths).sum(1) <= slots).all()
    if case.evicts:
        np.testing.assert_array_equal(state.lengths, BUDGET)


def test_a_fraction_is_of_each_rows_own_prompt(case, make_stream):
    stream = make_stream()
    if not case.fractions:
        pytest.skip("it has no such budget")
    policy = case.make(0.4)
    _, _, state = rows_after_prefill(stream, policy)
    np.testing.assert_array_equal(state.lengths.sum(1), [2 * 16, 2 * 10])


def test_positions_are_unique_and_tokens_a_prefix_of_their_segment(policy, make_stream):
    stream = make_stream()
    spec, _, state = rows_after_prefill(stream, policy)
    for step in range(STEPS):
        _, state = stream.decode(policy, spec, state, jnp.asarray(LENGTHS + step, jnp.int32))
        for row in range(2):
            for head in range(2):
                segment = segment_of(spec, state, row, head)
                length = int(state.lengths[row, head])
                assert (segment[:length] >= 0).all()
                assert (segment[length:] == kvjax.EMPTY).all()
                assert len(set(segment[:length])) == length
                # The newest token is always there.
                assert LENGTHS[row] + step in segment


def test_what_empty_slots_hold_changes_nothing(policy, make_stream):
    stream = make_stream()
    lengths = np.asarray([7, 3])
    spec, new_spec = stream.spec(policy, WIDTH, STEPS), stream.spec(policy, WIDTH + 16, STEPS)
    _, state = stream.prefill(policy, spec, stream.positions(lengths, WIDTH))
    empty = (np.asarray(state.positions) == kvjax.EMPTY)[..., None]
    assert empty.any()
    states = [state._replace(kv=jnp.where(empty, fill, state.kv)) for fill in (0.0, jnp.nan)]
    clean, poisoned = (stream.decode(policy, spec, s, jnp.asarray(lengths, jnp.int32))[0] for s in states)
    np.testing.assert_array_equal(clean, poisoned)
    # Nor does it reach the next turn.
    turn = stream.positions(np.asarray([5, 9]), 11, start=lengths)
    clean, poisoned = (stream.extend(policy, new_spec, s, turn, held_spec=spec) for s in states)
    held = np.asarray(turn) >= 0
    np.testing.assert_array_equal(np.asarray(clean[0])[held], np.asarray(poisoned[0])[held])
    np.testing.assert_array_equal(clean[1].positions, poisoned[1].positions)


# What a layer's keys, queries or values may hold: of some tokens, or of all.
RUBBISH = {
    "NaN keys": ("key", slice(5, 30), jnp.nan),
    "infinite keys": ("key", slice(5, 30), jnp.inf),
    "negative infinite keys": ("key", slice(20, None), -jnp.inf),
    "huge keys": ("key", slice(None), 3e38),
    "equal keys": ("key", slice(None), 0.0),
    "NaN queries": ("query", slice(None), jnp.nan),
    "infinite queries": ("query", slice(9, None), jnp.inf),
    "NaN values": ("value", slice(5, None), jnp.nan),
    "infinite values": ("value", slice(5, 30), jnp.inf),
}


@pytest.mark.parametrize("rubbish", RUBBISH)
def test_a_selection_is_a_set_whatever_the_scores(case, policy, make_stream, rubbish):
    """Scores that are NaN, infinite or equal: the budget is kept, no position twice, sinks and recent tokens there."""
    name, tokens, value = RUBBISH[rubbish]
    stream = make_stream()
    changed = getattr(stream, name).copy()
    changed[:, tokens] = value
    stream = dataclasses.replace(stream, **{name: changed})
    spec, _, state = rows_after_prefill(stream, policy)
    assert_sets(case, policy, spec, state, LENGTHS)
    for step in range(2):
        _, state = stream.decode(policy, spec, state, jnp.asarray(LENGTHS + step, jnp.int32))
        assert_sets(case, policy, spec, state, LENGTHS + step + 1)
    seen, added = LENGTHS + 2, np.asarray([6, 11])
    new_spec = stream.spec(policy, WIDTH + 16, STEPS)
    _, state = stream.extend(policy, new_spec, state, stream.positions(added, 11, start=seen), held_spec=spec)
    assert_sets(case, policy, new_spec, state, seen + added)


def assert_sets(case, policy, spec, state, seen) -> None:
    for row, length in enumerate(map(int, seen)):
        held = [kept(spec, state, row, head) for head in range(2)]
        for positions, count in zip(held, np.asarray(state.lengths)[row], strict=True):
            assert len(set(positions)) == len(positions) == count
            assert positions.max() == length - 1 or case.recent == 0
            assert set(range(getattr(policy, "sinks", 0))) <= set(positions)
            assert set(range(length - case.recent, length)) <= set(positions)
        room = 0 if case.evicts else 2
        total, most = sum(map(len, held)), sum(case.held(BUDGET, length))
        assert total == most if case.evicts else most <= total <= most + 2 * room


def test_a_row_does_not_depend_on_its_batch_or_its_padding(policy, make_stream):
    stream = make_stream()
    spec, output, together = rows_after_prefill(stream, policy)
    only, length = slice(1, 2), LENGTHS[1:]
    alone_spec = stream.spec(policy, int(length[0]), STEPS)
    alone_output, alone = stream.prefill(policy, alone_spec, stream.positions(length, int(length[0])), rows=only)
    assert_close(output[1, : length[0]], alone_output[0])
    for step in range(3):
        positions = jnp.asarray(LENGTHS + step, jnp.int32)
        both, together = stream.decode(policy, spec, together, positions)
        one, alone = stream.decode(policy, alone_spec, alone, positions[only], rows=only)
        assert_close(both[1], one[0])
    for head in range(2):
        np.testing.assert_array_equal(kept(spec, together, 1, head), kept(alone_spec, alone, 0, head))


def test_a_row_with_an_empty_position_stays_as_it_is(policy, make_stream):
    stream = make_stream()
    spec, _, state = rows_after_prefill(stream, policy)
    _, after = stream.decode(policy, spec, state, jnp.asarray([kvjax.EMPTY, LENGTHS[1]], jnp.int32))
    for before_leaf, after_leaf in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before_leaf[0], after_leaf[0])
    assert int(after.positions.max(axis=1)[1]) == LENGTHS[1]


def test_an_equal_policy_does_not_trace_again(case, make_stream):
    stream = make_stream()
    traced = []

    def run(policy, spec, state, arrays, positions):
        traced.append(policy)
        return policy.decode(spec, state, *arrays, positions, stream.model.rope)

    positions = jnp.asarray(LENGTHS, jnp.int32)
    jitted = jax.jit(run, static_argnums=(0, 1))
    for _ in range(3):
        policy = case.make(BUDGET)
        spec, _, state = rows_after_prefill(stream, policy)
        jitted.eval_shape(policy, spec, state, tuple(x[:, 0] for x in stream.take(positions[:, None])), positions)
    assert len(traced) == 1


def test_a_second_turn_sees_what_is_kept_and_itself(case, policy, make_stream):
    if case.places is not None or getattr(policy, "prefill_mask", "dense") == "streaming":
        pytest.skip("what its second turn sees: test_streaming_llm.py, test_duo_attention.py")
    stream = make_stream()
    spec, _, state = rows_after_prefill(stream, policy)
    added = np.asarray([6, 11])
    turn = stream.positions(added, 11, start=LENGTHS)
    new_spec = stream.spec(policy, WIDTH + 16, STEPS)
    output, extended = stream.extend(policy, new_spec, state, turn, held_spec=spec)
    for row in range(2):
        for index in range(added[row]):
            position = int(LENGTHS[row]) + index
            for head in range(stream.model.num_query_heads):
                seen = np.append(kept(spec, state, row, head // 3), np.arange(LENGTHS[row], position + 1))
                expected = stream.expected(row, head, position, seen)
                assert_close(output[row, index, head], expected)
    total = [sum(case.held(BUDGET, int(length))) for length in LENGTHS + added]
    np.testing.assert_array_equal(extended.lengths.sum(1), total)


def test_a_second_turn_keeps_the_budget_and_goes_on(case, policy, make_stream):
    stream = make_stream()
    spec, _, state = rows_after_prefill(stream, policy)
    added = np.asarray([6, 11])
    turn = stream.positions(added, 11, start=LENGTHS)
    new_spec = stream.spec(policy, WIDTH + 16, STEPS)
    _, state = stream.extend(policy, new_spec, state, turn, held_spec=spec)
    total = [sum(case.held(BUDGET, int(length))) for length in LENGTHS + added]
    np.testing.assert_array_equal(state.lengths.sum(1), total)
    for row in range(2):
        newest = int(LENGTHS[row] + added[row]) - 1
        assert set(range(newest - case.recent + 1, newest + 1)) <= set(kept(new_spec, state, row, 0))
    _, state = stream.decode(policy, new_spec, state, jnp.asarray(LENGTHS + added, jnp.int32))
    assert int(state.positions.max()) == int((LENGTHS + added).max())


def test_a_token_without_a_slot_is_loud(case, policy, make_stream):
    if case.evicts:
        pytest.skip("it has a slot for every token")
    stream = make_stream()
    lengths = np.asarray([WIDTH, WIDTH])
    spec = stream.spec(policy, WIDTH, STEPS)
    _, state = stream.prefill(policy, spec, stream.positions(lengths, WIDTH))
    for step in range(STEPS):
        fine, state = stream.decode(policy, spec, state, jnp.asarray(lengths + step, jnp.int32))
        assert np.isfinite(fine).all()
    assert (np.asarray(policy.free_slots(spec, state)) == 0).all()
    lost, after = stream.decode(policy, spec, state, jnp.asarray(lengths + STEPS, jnp.int32))
    assert np.isnan(lost).all()
    np.testing.assert_array_equal(state.kv, after.kv)
