"""StreamingLLM: the ring, the streaming mask of a prompt, and positions that are places in the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import StreamingLLM

EMPTY = kvjax.EMPTY
LENGTHS = np.asarray([40, 23])


def held(spec: kvjax.LayerSpec, state: kvjax.LayerState, row: int, head: int) -> list[int]:
    start = spec.starts[head]
    positions = np.asarray(state.positions)[row, start : start + spec.slots[head]]
    return sorted(positions[positions != EMPTY].tolist())


def append_and_drop(tokens: list[int], new: int, *, sinks: int, budget: int) -> list[int]:
    """The cache as a list: a token comes, and the oldest behind the sinks goes."""
    tokens = [*tokens, new]
    if len(tokens) > budget:
        del tokens[sinks]
    return tokens


@pytest.mark.parametrize(("sinks", "budget"), [(4, 12), (0, 7), (4, 5), (1, 30)])
def test_the_ring_holds_what_a_list_would(make_stream, sinks, budget):
    stream = make_stream(length=160)
    policy = StreamingLLM(budget=budget, sinks=sinks)
    # The first row starts under the budget, with less than its sinks; the second over it.
    lengths = np.asarray([3, 41])
    spec = stream.spec(policy, 41, 100)
    _, state = stream.prefill(policy, spec, stream.positions(lengths, 41))
    tokens: list[list[int]] = [[], []]
    for row in range(2):
        for position in range(lengths[row]):
            tokens[row] = append_and_drop(tokens[row], position, sinks=sinks, budget=budget)
    for step in range(101):
        for row in range(2):
            for head in range(2):
                assert held(spec, state, row, head) == tokens[row]
            tokens[row] = append_and_drop(tokens[row], int(lengths[row]) + step, sinks=sinks, budget=budget)
        _, state = stream.decode(policy, spec, state, jnp.asarray(lengths + step, jnp.int32))
    # Every slot holds the key and the value of the token that it says it holds.
    positions = np.asarray(state.positions)
    heads = np.arange(positions.shape[1]) // budget
    keys = stream.model.rope.rotate(
        jnp.asarray(stream.key), jnp.broadcast_to(jnp.arange(160, dtype=jnp.int32), (2, 160))
    )
    for row in range(2):
        wanted = np.concatenate(
            [np.asarray(keys)[row, positions[row], heads], np.asarray(stream.value)[row, positions[row], heads]],
            axis=-1,
        )
        np.testing.assert_allclose(state.kv[row], wanted, atol=2e-5)


def test_a_fraction_makes_a_ring_of_each_rows_own_size(make_stream):
    stream = make_stream(length=160)
    policy = StreamingLLM(budget=0.3, sinks=2)
    budgets = [12, 6]  # 0.3 * 40, and 0.3 * 23 floored
    spec = stream.spec(policy, 40, 30)
    _, state = stream.prefill(policy, spec, stream.positions(LENGTHS, 40))
    tokens = [
        [0, 1, *range(length - budget + 2, length)] for length, budget in zip(map(int, LENGTHS), budgets, strict=True)
    ]
    for step in range(30):
        for row in range(2):
            assert held(spec, state, row, 0) == tokens[row]
            tokens[row] = append_and_drop(tokens[row], int(LENGTHS[row]) + step, sinks=2, budget=budgets[row])
        _, state = stream.decode(policy, spec, state, jnp.asarray(LENGTHS + step, jnp.int32))


SETTINGS = [(4, "cache"), (4, "absolute"), (0, "cache")]


@pytest.fixture(scope="module")
def one_by_one(make_stream):
    """The outputs [B, T, N, D] and the state that decoding the tokens one by one gives."""
    results = {}

    def decode_all(policy):
        if policy not in results:
            stream = make_stream()
            spec = stream.spec(policy, 40, 8)
            first, state = stream.prefill(policy, spec, stream.positions(np.asarray([1, 1]), 1))
            outputs = [first[:, 0]]
            for step in range(1, 40):
                positions = np.where(step < LENGTHS, step, EMPTY)
                output, state = stream.decode(policy, spec, state, jnp.asarray(positions, jnp.int32))
                outputs.append(output)
            results[policy] = (np.stack(outputs, axis=1), state)
        return results[policy]

    return decode_all


def assert_same_state(state, wanted):
    np.testing.assert_array_equal(state.positions, wanted.positions)
    np.testing.assert_array_equal(state.lengths, wanted.lengths)
    filled = np.asarray(state.positions) != EMPTY
    np.testing.assert_allclose(np.asarray(state.kv)[filled], np.asarray(wanted.kv)[filled], atol=1e-5)


@pytest.mark.parametrize(("sinks", "positions"), SETTINGS)
def test_the_streaming_mask_shows_a_prompt_what_decoding_would_show(make_stream, one_by_one, sinks, positions):
    policy = StreamingLLM(budget=12, sinks=sinks, positions=positions, prefill_mask="streaming")
    stream = make_stream()
    outputs, wanted = one_by_one(policy)
    output, state = stream.prefill(policy, stream.spec(policy, 48, 8), stream.positions(LENGTHS, 48))
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(output[row, :length], outputs[row, :length], atol=2e-5)
    assert_same_state(state, wanted)


@pytest.mark.parametrize(("sinks", "positions"), SETTINGS)
def test_chunks_of_any_size_give_what_one_token_at_a_time_gives(make_stream, one_by_one, sinks, positions):
    policy = StreamingLLM(budget=12, sinks=sinks, positions=positions, prefill_mask="streaming")
    stream = make_stream()
    outputs, wanted = one_by_one(policy)
    spec = stream.spec(policy, 40, 8)
    # The first chunks are shorter than the sinks, others longer than the window, and a row has none at last.
    chunks = np.asarray([[2, 3], [1, 12], [14, 1], [9, 6], [14, 1]])
    assert (chunks.sum(0) == LENGTHS).all()
    output, state = stream.prefill(policy, spec, stream.positions(chunks[0], 14))
    start = chunks[0]
    for row in range(2):
        np.testing.assert_allclose(output[row, : start[row]], outputs[row, : start[row]], atol=2e-5)
    for sizes in chunks[1:]:
        output, state = stream.extend(policy, spec, state, stream.positions(sizes, 14, start=start))
        for row in range(2):
            np.testing.assert_allclose(
                output[row, : sizes[row]], outputs[row, start[row] : start[row] + sizes[row]], atol=2e-5
            )
        start = start + sizes
    assert_same_state(state, wanted)


@pytest.mark.parametrize("sinks", [4, 0])
def test_a_dense_second_turn_stands_right_behind_what_is_kept(make_stream, sinks):
    stream = make_stream()
    policy = StreamingLLM(budget=12, sinks=sinks)
    spec = stream.spec(policy, 40, 24)
    _, state = stream.prefill(policy, spec, stream.positions(LENGTHS, 40))
    added = np.asarray([6, 13])
    turn = stream.positions(added, 13, start=LENGTHS)
    output, extended = stream.extend(policy, spec, state, turn)
    for row in range(2):
        kept = [*range(sinks), *range(LENGTHS[row] - 12 + sinks, LENGTHS[row])]
        assert held(spec, state, row, 0) == kept
        for index in range(added[row]):
            position = int(LENGTHS[row]) + index
            seen = np.asarray([*kept, *range(LENGTHS[row], position + 1)])
            # 12 are kept, so the turn's tokens stand at 12, 13, 14, ...
            places = np.append(np.arange(len(seen)), 12 + index)
            for head in range(stream.model.num_query_heads):
                wanted = stream.expected(row, head, position, seen, places)
                np.testing.assert_allclose(output[row, index, head], wanted, atol=2e-5)
        end = int(LENGTHS[row] + added[row])
        assert held(spec, extended, row, 1) == [*range(sinks), *range(end - 12 + sinks, end)]


@pytest.mark.parametrize("far", [10**6, 2**30])
def test_a_stream_of_millions_of_tokens_is_as_good_as_new(make_stream, far):
    stream = make_stream()
    policy = StreamingLLM(budget=12)
    spec = stream.spec(policy, 40, 24)
    _, near = stream.prefill(policy, spec, stream.positions(np.asarray([40, 40]), 40))
    # Whole rounds of the ring later: the sinks stay at 0 to 3, the window has moved on.
    shift = far // 8 * 8
    positions = jnp.where(near.positions < 4, near.positions, near.positions + shift)
    heads = np.arange(24) // 12
    keys = np.stack([np.asarray(stream.key)[row, near.positions[row], heads] for row in range(2)])
    keys = stream.model.rope.rotate(jnp.asarray(keys)[:, :, None], positions)[:, :, 0]
    away = near._replace(kv=near.kv.at[..., :16].set(keys), positions=positions)
    decode = jax.jit(policy.decode, static_argnums=(0, 6))
    for step in range(20):
        arrays = [x[:, 40 + step] for x in (stream.query, stream.key, stream.value)]
        now = jnp.full(2, 40 + step, jnp.int32)
        output, near = decode(spec, near, *arrays, now, stream.model.rope)
        far_output, away = decode(spec, away, *arrays, now + shift, stream.model.rope)
        largest = np.abs(output - far_output).max()
        assert largest < 5e-3, f"outputs differ by {largest:.1e} at step {step}"
        np.testing.assert_array_equal(
            away.positions, np.where(near.positions < 4, near.positions, near.positions + shift)
        )


def test_with_absolute_positions_the_sinks_are_ever_further_away(make_stream):
    stream = make_stream()
    by_cache, absolute = (StreamingLLM(budget=12, positions=p) for p in ("cache", "absolute"))
    spec = stream.spec(by_cache, 40, 24)
    _, state = stream.prefill(by_cache, spec, stream.positions(LENGTHS, 40))
    outputs = [stream.decode(p, spec, state, jnp.asarray(LENGTHS, jnp.int32))[0] for p in (by_cache, absolute)]
    assert np.abs(outputs[0] - outputs[1]).max() > 0.1


class Recorder:
    """A rotation that writes down the positions that it is asked for."""

    def __init__(self, rope):
        self.rope, self.asked = rope, []

    def rotate(self, x, positions):
        self.asked.append((x.shape[2], np.asarray(positions)))
        return self.rope.rotate(x, positions)


def test_no_query_is_turned_further_from_the_sinks_than_the_cache_is_long(make_stream):
    stream = make_stream()
    policy = StreamingLLM(budget=12, prefill_mask="streaming")
    spec = stream.spec(policy, 40, 24)
    rope = Recorder(stream.model.rope)
    positions = stream.positions(LENGTHS, 40)
    query, key, value = map(jnp.asarray, stream.take(positions))
    _, state = policy.prefill(spec, query, key, value, positions, rope)
    turn = stream.positions(np.asarray([6, 6]), 6, start=LENGTHS)
    query, key, value = map(jnp.asarray, stream.take(turn))
    _, state = policy.extend(spec, state, query, key, value, turn, rope)
    last = jnp.asarray(LENGTHS + 6, jnp.int32)
    query, key, value = (jnp.asarray(x[:, 0]) for x in stream.take(last[:, None]))
    policy.decode(spec, state, query, key, value, last, rope)
    # Of each call: the query for the window, the key, and the query for the sinks, which stand at 0 to 3.
    heads = [count for count, _ in rope.asked]
    assert heads == [6, 2, 6] * 3
    for _, places in rope.asked[2::3]:
        assert places.max() == 12
        assert places.max() <= policy.total


def test_a_window_is_a_budget_less_the_sinks(make_stream):
    model = make_stream().model
    by_window, by_budget = StreamingLLM(window=252), StreamingLLM(budget=256)
    assert by_window.total == by_budget.total == StreamingLLM(budget=256, window=252).total == 256
    assert by_window.layer_specs(model, 1000, 10) == by_budget.layer_specs(model, 1000, 10)
    assert by_window.layer_specs(model, 1000, 10)[0].slots == (256, 256)


def test_a_ring_has_the_same_slots_for_any_prompt_and_any_answer(make_stream):
    model = make_stream().model
    slots = {StreamingLLM(budget=16).layer_specs(model, n, new)[0].slots for n in (1, 16, 999) for new in (1, 5000)}
    assert slots == {(16, 16)}


def test_positions_are_bounded_by_the_cache_or_the_prompt():
    assert StreamingLLM(budget=16, prefill_mask="streaming").is_bounded(10_000, 4096)
    assert StreamingLLM(budget=16).is_bounded(4096, 4096)
    assert not StreamingLLM(budget=16).is_bounded(4097, 4096)
    assert not StreamingLLM(budget=16, positions="absolute").is_bounded(1, 4096)


def test_the_kvpress_preset_takes_its_arguments():
    assert StreamingLLM.kvpress(compression_ratio=0.75, n_sink=2) == StreamingLLM(
        budget=0.25, sinks=2, positions="absolute"
    )
    assert StreamingLLM.kvpress(compression_ratio=0.5).sinks == 4


def test_a_fraction_that_leaves_no_window_is_an_error():
    policy = StreamingLLM.kvpress(compression_ratio=0.5)
    policy.check_lengths(np.asarray([10, 300]))
    with pytest.raises(ValueError, match=r"`budget` = 0.5 of the 9 tokens of row 1 is 4 tokens, under .* = 5; give a"):
        policy.check_lengths(np.asarray([300, 9]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"StreamingLLM needs a `budget` or a `window`, got neither"),
        ({"budget": 256, "window": 256}, r"`sinks` \+ `window` must be the `budget` .* got 4 \+ 256 and 256"),
        ({"budget": 0.5, "window": 8}, r"`sinks` \+ `window` must be the `budget` .* got 4 \+ 8 and 0.5"),
        ({"budget": 4}, r"`budget` must be at least `sinks` \+ a window of 1 = 5 tokens, got 4"),
        ({"budget": 8, "sinks": 8}, r"at least `sinks` \+ a window of 1 = 9 tokens, got 8"),
        ({"budget": 0}, r"`budget` must be at least 1 token, got 0"),
        ({"budget": -3}, r"`budget` must be at least 1 token, got -3"),
        ({"budget": 1.5}, r"`budget` must be a number of tokens .* or a fraction .* got 1.5"),
        ({"budget": 0.0}, r"or a fraction of the prompt \(float between 0 and 1\), got 0.0"),
        ({"budget": 1.0}, r"got 1.0"),
        ({"budget": float("nan")}, r"got nan"),
        ({"budget": True}, r"`budget` must be a number of tokens .* got True"),
        ({"budget": "256"}, r"`budget` must be a number of tokens .* got '256'"),
        ({"window": 0}, r"`window` must be at least 1 token, got 0"),
        ({"budget": 8, "sinks": -1}, r"`sinks` must not be negative, got -1"),
        ({"budget": 8, "positions": "rolling"}, r'`positions` must be "cache" or "absolute", got \'rolling\''),
        ({"budget": 8, "prefill_mask": "full"}, r'`prefill_mask` must be "dense" or "streaming", got \'full\''),
        (
            {"budget": 0.5, "prefill_mask": "streaming"},
            r'`prefill_mask="streaming"` needs a `budget` in tokens, got 0.5',
        ),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_rejects_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        StreamingLLM(**settings)


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, 2.0])
def test_rejects_a_ratio_that_keeps_nothing_or_everything(ratio):
    with pytest.raises(ValueError, match=f"`compression_ratio` must be between 0 and 1, got {ratio}"):
        StreamingLLM.kvpress(compression_ratio=ratio)
