"""Faults that users of other systems reported, each looked for in the policies that could have it.

One run a policy on a random model of four layers: a ragged prompt, some tokens, then turns of several tokens.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.state import whole_rows

BUDGET, SINKS, STEPS = 32, 4, 3
LENGTHS = (200, 37)
TURN = 16
POLICIES = {
    "streaming_llm": kvjax.StreamingLLM(budget=BUDGET),
    "h2o": kvjax.H2O(budget=BUDGET, recent_tokens=8),
    "snapkv": kvjax.SnapKV(budget=BUDGET, window=8),
    "pyramidkv": kvjax.PyramidKV(budget=BUDGET, window=8),
    "ada_kv": kvjax.AdaKV(budget=BUDGET, window=8),
    "duo": kvjax.DuoAttention(
        pattern=kvjax.HeadPattern.of([[0.1, 0.9], [0.9, 0.1], [0.2, 0.3], [0.8, 0.7]]), sinks=4, recent=28
    ),
}
BOUNDED = [name for name in POLICIES if name != "duo"]
APPENDING = ["snapkv", "pyramidkv", "ada_kv", "duo"]


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 512, length).tolist()


LONG, SHORT, OTHER = ids(1, LENGTHS[0]), ids(2, LENGTHS[1]), ids(3, 197)
TURNS = [[ids(10 + turn, TURN), ids(20 + turn, TURN - 5)] for turn in range(3)]


@dataclasses.dataclass
class Run:
    """What a policy gave: caches after the prompt, after the decoded tokens, and after each turn."""

    policy: kvjax.Policy
    logits: list[jax.Array]
    caches: list[kvjax.Cache]


@functools.cache
def run_of(model: kvjax.Model, name: str) -> Run:
    policy = POLICIES[name]
    logits, cache = kvjax.prefill(model, [LONG, SHORT], policy=policy, max_new_tokens=STEPS)
    outputs, caches = [logits], [cache]
    for step in range(STEPS):
        logits, cache = kvjax.decode(model, cache, np.asarray([step, step + 7]), donate=False)
        outputs.append(logits)
    caches.append(cache)
    for turn in TURNS:
        logits, cache = kvjax.extend(model, cache, turn, logits="all")
        outputs.append(logits)
        caches.append(cache)
    return Run(policy, outputs, caches)


@pytest.fixture(params=POLICIES)
def run(request, tiny) -> Run:
    return run_of(tiny, request.param)


def held(cache: kvjax.Cache) -> np.ndarray:
    """Tokens held, [layer, row, head]."""
    return np.stack([np.asarray(state.lengths) for state in cache.layers])


def slots(cache: kvjax.Cache) -> int:
    """Of all layers and heads."""
    return sum(sum(spec.slots) for spec in cache.specs)


def seen(cache: kvjax.Cache) -> list[int]:
    return cache.next_position.tolist()


@pytest.mark.parametrize("name", BOUNDED)
def test_memory_is_really_saved_under_grouped_queries(tiny, name):
    """Broken by: a cache that is masked, not shortened; a row for every query head, here four times the memory."""
    cache = run_of(tiny, name).caches[0]
    model = tiny.spec
    assert (model.num_query_heads, model.num_kv_heads) == (8, 2)
    for spec, state in zip(cache.specs, cache.layers, strict=True):
        rows = whole_rows(state, spec)
        # Rows of eight query heads could not fit, nor could a prompt of 200.
        assert rows.shape[1] <= model.num_kv_heads * (2 * BUDGET + STEPS)
        assert rows.shape[2] == 2 * model.head_dim
    # 2 B L n K D P, of the longer row's tokens.
    full = 2 * 2 * 4 * (LENGTHS[0] + STEPS) * 2 * 16 * 4
    assert kvjax.cache_bytes(cache) < 0.3 * full


def test_memory_is_saved_where_half_of_the_heads_stream(tiny):
    """Broken by: streaming heads that are masked only (kvpress)."""
    cache = run_of(tiny, "duo").caches[0]
    retrieval = max(cache.specs[0].slots)
    assert [sum(spec.slots) for spec in cache.specs] == [
        BUDGET + retrieval,
        BUDGET + retrieval,
        2 * BUDGET,
        2 * retrieval,
    ]


def test_pads_are_never_kept(run):
    """Broken by: the first columns of a padded batch taken for the first tokens (left-padded rows' sinks)."""
    for cache in run.caches:
        for layer in kvjax.kept_positions(cache):
            for row, end in zip(layer, seen(cache), strict=True):
                for head in row:
                    assert len(set(head.tolist())) == len(head)
                    assert head.min() == 0
                    assert head.max() == end - 1
                    assert set(range(SINKS)) <= set(head.tolist())


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_a_short_row_is_as_if_it_were_alone(tiny, name):
    """Broken by: pads that get attention, or that shift positions."""
    run = run_of(tiny, name)
    logits, cache = kvjax.prefill(tiny, SHORT, policy=run.policy, max_new_tokens=STEPS)
    np.testing.assert_allclose(logits[0], run.logits[0][1], atol=1e-4)
    together, alone = kvjax.kept_positions(run.caches[0]), kvjax.kept_positions(cache)
    for layer, only in zip(together, alone, strict=True):
        for head, wanted in zip(layer[1], only[0], strict=True):
            np.testing.assert_array_equal(head, wanted)


def test_scores_do_not_leak_between_rows(run, tiny):
    """Broken by: a top-k, a maximum or a mean over the batch."""
    logits, cache = kvjax.prefill(tiny, [OTHER, SHORT], policy=run.policy, max_new_tokens=STEPS)
    np.testing.assert_array_equal(logits[1], run.logits[0][1])
    for state, wanted in zip(cache.layers, run.caches[0].layers, strict=True):
        np.testing.assert_array_equal(state.lengths[1], wanted.lengths[1])
        np.testing.assert_array_equal(state.positions[1], wanted.positions[1])


def test_a_second_turn_continues_at_the_true_position(run):
    """Broken by: positions that go on from the compressed length."""
    ends = [list(LENGTHS), [n + STEPS for n in LENGTHS]]
    for turn in TURNS:
        ends.append([n + len(row) for n, row in zip(ends[-1], turn, strict=True)])
    assert [seen(cache) for cache in run.caches] == ends
    # The last tokens of a turn are held at their own positions, by every head.
    for cache, end in zip(run.caches[2:], ends[2:], strict=True):
        for layer in kvjax.kept_positions(cache):
            for row, last in zip(layer, end, strict=True):
                assert all(set(range(last - 4, last)) <= set(head.tolist()) for head in row)


def test_every_chunk_is_compressed(run):
    """Broken by: compressing at the first call only; the cache then grows by every later chunk."""
    for cache in run.caches[2:]:
        lengths = held(cache)
        if isinstance(run.policy, kvjax.DuoAttention):
            streams = np.stack([run.policy.streaming(layer) for layer in range(4)])[:, None]
            total = np.broadcast_to(np.asarray(seen(cache))[None, :, None], lengths.shape)
            np.testing.assert_array_equal(lengths, np.where(streams, BUDGET, total))
        else:
            # Layers and heads may share unequally; the total is the budget's, and no shape grows.
            assert lengths.sum(axis=(0, 2)).tolist() == [4 * 2 * BUDGET] * 2
            assert slots(cache) <= slots(run.caches[2])
    # And the choice is over all of them: something of the first chunk has gone since.
    before, after = (kvjax.kept_positions(cache)[0][0][0] for cache in run.caches[-2:])
    assert set(before.tolist()) - set(after.tolist())


def test_layers_of_different_lengths_take_a_second_turn(tiny):
    """Broken by: one attention mask for all layers."""
    run = run_of(tiny, "pyramidkv")
    lengths = held(run.caches[-1])[:, 0, 0]
    assert len(set(lengths.tolist())) == 4
    assert all(np.isfinite(logits).all() for logits in run.logits[: STEPS + 1])
    assert np.isfinite(run.logits[-1][0]).all()


@pytest.mark.parametrize("name", ["h2o", "pyramidkv", "ada_kv", "duo"])
def test_attention_is_causal_after_eviction(tiny, name):
    """Broken by: a mask by index, or `is_causal`, where cached tokens are fewer than positions."""
    run = run_of(tiny, name)
    cache, turn = run.caches[1], TURNS[0]
    wanted = np.asarray(run.logits[STEPS + 1])
    for changed in (10, 3):
        rows = [list(row) for row in turn]
        for row in rows:
            row[changed] = (row[changed] + 1) % 512
        logits, _ = kvjax.extend(tiny, cache, rows, logits="all")
        # What comes before a token does not see it; it and what comes after do.
        np.testing.assert_array_equal(np.asarray(logits)[:, :changed], wanted[:, :changed])
        differs = np.abs(np.asarray(logits) - wanted).max(-1)
        assert (differs[0, changed:TURN] > 1e-4).all()
        assert (differs[1, changed : TURN - 5] > 1e-4).all()


@pytest.mark.parametrize("name", APPENDING)
def test_nothing_is_written_past_the_capacity(tiny, name):
    """Broken by: `dynamic_update_slice`, which clamps its start and overwrites the last tokens."""
    cache = run_of(tiny, name).caches[1]
    # A head that keeps all has room for the padded prompt, and is full some tokens later.
    for _ in range(24 if name == "duo" else 0):
        _, cache = kvjax.decode(tiny, cache, np.asarray([1, 2]), donate=False)
    before = held(cache)
    message = r"the cache has no slot left for row 0: it was made with `max_new_tokens=3`; ask for more, or make room"
    with pytest.raises(ValueError, match=message):
        kvjax.decode(tiny, cache, np.asarray([1, 2]))
    np.testing.assert_array_equal(held(cache), before)


@pytest.mark.parametrize("name", ["streaming_llm", "h2o"])
def test_a_cache_that_evicts_takes_more_than_was_asked_for(tiny, name):
    """Broken by: a capacity that is counted where there is none."""
    cache = run_of(tiny, name).caches[1]
    for token in range(5):
        logits, cache = kvjax.decode(tiny, cache, np.asarray([token, token]), donate=False)
        assert np.isfinite(logits).all()
        assert held(cache).max() == BUDGET
    assert seen(cache) == [n + STEPS + 5 for n in LENGTHS]


@pytest.mark.parametrize("name", ["streaming_llm", "h2o", "pyramidkv", "ada_kv"])
def test_the_smallest_prompts_are_kept(tiny, name):
    """Broken by: windows longer than the prompt, and counts that are divided by zero."""
    prompt = [ids(5, 1), ids(6, 9)]
    logits, cache = kvjax.prefill(tiny, prompt, policy=POLICIES[name], max_new_tokens=2)
    assert np.isfinite(logits).all()
    assert held(cache).tolist() == [[[1, 1], [9, 9]]] * 4
    logits, cache = kvjax.decode(tiny, cache, np.asarray([4, 5]))
    assert np.isfinite(logits).all()
    assert held(cache).tolist() == [[[2, 2], [10, 10]]] * 4


@pytest.mark.parametrize(
    ("policy", "length", "message"),
    [
        (kvjax.StreamingLLM.kvpress(compression_ratio=0.99), 40, r"of the 40 tokens of row 0 is 0 tokens, under `s"),
        (kvjax.H2O.kvpress(compression_ratio=0.9), 5, r"of the 5 tokens of row 0 is 0 tokens, under `sinks`.* = 1;"),
        (
            kvjax.SnapKV.kvpress(compression_ratio=0.9),
            300,
            r"is 29 tokens, under `sinks` \+ `window` = 64; give a",
        ),
        (kvjax.TOVA.kvpress(compression_ratio=0.5), 1, r"of the 1 tokens of row 0 is 0 tokens"),
        (kvjax.Knorm.kvpress(compression_ratio=0.5), 1, r"of the 1 tokens of row 0 is 0 tokens"),
        (kvjax.ExpectedAttention.kvpress(compression_ratio=0.5), 6, r"is 3 tokens, under `sinks` = 4"),
    ],
)
def test_a_ratio_that_would_leave_nothing_is_an_error(tiny, policy, length, message):
    """Broken by: an empty cache, whose softmax is 0 / 0."""
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(tiny, ids(5, length), policy=policy, max_new_tokens=1)


def test_a_fraction_is_one_of_everything_seen_so_far(tiny):
    """Broken by: a budget that is worked out once, from the first prompt."""
    policy = kvjax.PyramidKV(budget=0.5, window=4)
    _, cache = kvjax.prefill(tiny, ids(5, 40), policy=policy, max_new_tokens=1)
    assert held(cache).sum() == 4 * 2 * 20
    _, cache = kvjax.extend(tiny, cache, ids(6, 20))
    # 12 + 20 tokens at the least: half of 60 are there to be kept, but not in a layer that had dropped more.
    assert 4 * 2 * 20 < held(cache).sum() <= 4 * 2 * 30
    assert held(cache).max() > 30


def temporary_bytes(policy: kvjax.Policy, model: kvjax.ModelSpec, length: int) -> int:
    """What one layer's compiled prefill needs beside its arguments and results."""
    heads = (model.num_query_heads, model.num_kv_heads, model.num_kv_heads)
    arrays = [jax.ShapeDtypeStruct((1, length, h, model.head_dim), jnp.float32) for h in heads]
    positions = jax.ShapeDtypeStruct((1, length), jnp.int32)
    prefill = jax.jit(policy.prefill, static_argnums=(0, 5))
    spec = policy.layer_specs(model, length, 8)[0]
    analysis = prefill.lower(spec, *arrays, positions, model.rope).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize(
    "policy",
    [
        kvjax.ExpectedAttention(budget=512),
        kvjax.AdaKV(budget=512),
        dataclasses.replace(POLICIES["duo"], prefill_mask="streaming"),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_memory_for_the_scores_grows_with_the_prompt_not_its_square(tiny, policy):
    """Broken by: the whole matrix of attention. H2O and SnapKV: tests/policies/test_h2o.py."""
    short, long = (temporary_bytes(policy, tiny.spec, length) for length in (2048, 8192))
    assert long / short <= 4.4, f"{short:,} bytes for 2,048 tokens and {long:,} for 8,192"
