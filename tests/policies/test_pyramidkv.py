"""PyramidKV: layer budgets, by hand and to the token, and a cache whose layers differ in length."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import Pyramid, PyramidKV
from kvjax.allocation import count_table
from kvjax.rope import Rope
from kvjax.state import whole_rows


def counts(pyramid: Pyramid, budget: int | float, length: int, layers: int, fewest: int) -> list[int]:
    return pyramid.counts(budget, np.asarray([length]), layers=layers, fewest=fewest)[:, 0].tolist()


def test_linear_budgets_by_hand():
    # Outside 36 tokens that stay anyway the mean is 100: the last of 5 layers gets 100 / 20, the first 200 - 5.
    wanted = [36 + share for share in (195, 147.5, 100, 52.5, 5)]
    # Of the two halves the lower layer's is rounded up.
    assert counts(Pyramid(), 136, 10_000, 5, 36) == [231, 184, 136, 88, 41]
    assert sum(wanted) == 5 * 136
    # beta = 2: from 150 to 50.
    assert counts(Pyramid(beta=2), 136, 10_000, 5, 36) == [186, 161, 136, 111, 86]


def test_geometric_budgets_by_hand():
    # beta = 1.5 means ends as 2 to 1, as in the linear one. A factor of 2 ** -(1 / 2) a layer over three:
    # 1 + 0.7071 + 0.5 = 2.2071 parts of 3 * 100 tokens: 135.93, 96.12 and 67.96; one token goes to .96, one to .93.
    assert counts(Pyramid(beta=1.5, schedule="geometric"), 110, 10_000, 3, 10) == [146, 106, 78]


@pytest.mark.parametrize("schedule", ["linear", "geometric"])
def test_beta_of_one_is_uniform(schedule):
    assert counts(Pyramid(beta=1, schedule=schedule), 64, 1000, 6, 12) == [64] * 6


def test_what_a_short_prompt_cannot_use_goes_to_other_layers():
    # Unclamped: 190, 145, 100, 55, 10 (beta = 10, nothing is kept anyway). A prompt of 120 leaves 70 + 25 = 95,
    # in equal parts of 95 / 3 for the three others: 131.7, clamped in turn, whose 11.7 the last two share.
    assert counts(Pyramid(beta=10), 100, 10_000, 5, 0) == [190, 145, 100, 55, 10]
    assert counts(Pyramid(beta=10), 100, 120, 5, 0) == [120, 120, 120, 93, 47]
    assert counts(Pyramid(beta=10), 100, 100, 5, 0) == [100] * 5


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    budget=st.one_of(st.integers(1, 3000), st.floats(0.01, 0.99)),
    lengths=st.lists(st.integers(0, 9000), min_size=1, max_size=4),
    layers=st.integers(1, 80),
    fewest=st.integers(0, 200),
    beta=st.floats(1, 64),
    schedule=st.sampled_from(["linear", "geometric"]),
)
def test_the_total_is_exact_and_no_layer_gets_too_much_or_too_little(budget, lengths, layers, fewest, beta, schedule):
    pyramid = Pyramid(beta=beta, schedule=schedule)
    table = pyramid.counts(budget, np.asarray(lengths), layers=layers, fewest=fewest)
    for column, length in zip(table.T.tolist(), lengths, strict=True):
        mean = min(budget, length) if isinstance(budget, int) else int(length * budget)
        if mean >= min(fewest, length):
            assert sum(column) == layers * mean
            assert min(column) >= min(fewest, length) or layers == 1
        assert max(column) <= length
        # A pyramid stands on its base; a remainder may lift a layer by one token.
        assert all(above <= below + 1 for below, above in itertools.pairwise(column))


def authors_budgets(capacity: int, length: int, layers: int, window: int, beta: int = 20) -> list[int]:
    """The article's code, in integers."""
    if length <= capacity:
        return [length] * layers
    outside = capacity - window
    if length < outside * 2:
        return [capacity] * layers
    smallest = outside // beta
    largest = outside * 2 - smallest
    if largest >= length - window:
        largest, smallest = length - window, outside * 2 - (length - window)
    return [largest - layer * ((largest - smallest) // (layers - 1)) + window for layer in range(layers)]


def kvpress_budgets(kept: float, length: int, layers: int, window: int, beta: float = 20) -> list[int]:
    """Kvpress's, in floats; `kept` is n (1 - r)."""
    smallest = kept / beta
    largest = 2 * kept - smallest
    if largest >= length - window:
        largest = length - window
        smallest = 2 * kept - largest
    if length >= largest >= smallest >= window:
        return [round(largest - layer * (largest - smallest) / (layers - 1)) for layer in range(layers)]
    return [max(1, round(kept))] * layers


def test_the_authors_budgets_by_hand():
    # 128 - 8 = 120: the last gets 6, the first 234, in steps of 228 // 31 = 7.
    wanted = [234 - 7 * layer + 8 for layer in range(32)]
    assert wanted[0] == 242
    assert wanted[-1] == 25
    assert counts(Pyramid(variant="authors"), 128, 8000, 32, 8) == wanted == authors_budgets(128, 8000, 32, 8)


def test_kvpresss_budgets_by_hand():
    # The reference file's: 180 of 300 tokens, window 8. 360 - 9 = 351 is more than 292, so from 292 to 68 in thirds.
    assert counts(Pyramid(variant="kvpress"), 0.6, 300, 4, 8) == [292, 217, 143, 68]
    # A last layer under the window: uniform.
    assert counts(Pyramid(variant="kvpress"), 0.25, 4096, 4, 64) == [1024] * 4


@pytest.mark.parametrize("layers", [2, 4, 32])
@pytest.mark.parametrize("budget", [64, 128, 408, 1024])
def test_the_variants_are_as_their_authors_wrote_them(layers, budget):
    lengths = np.unique(np.concatenate([np.arange(1, 80), np.arange(budget - 9, budget + 9), [500, 789, 795, 1500],
                                        np.arange(2 * budget - 40, 2 * budget + 40, 3), [4096, 9000]]))  # fmt: skip
    authors, kvpress = Pyramid(variant="authors"), Pyramid(variant="kvpress")
    for pyramid, reference in ((authors, authors_budgets), (kvpress, kvpress_budgets)):
        table = pyramid.counts(budget, lengths, layers=layers, fewest=8)
        looked_up = count_table(pyramid, budget, layers=layers, fewest=8, max_length=9000)
        for column, length in enumerate(lengths.tolist()):
            wanted = np.minimum(reference(min(budget, length), length, layers, 8), length).tolist()
            assert table[:, column].tolist() == wanted, (pyramid, length)
            # What runs is a table that ends where all longer prompts are alike.
            assert looked_up[:, min(length, looked_up.shape[1] - 1)].tolist() == wanted, (pyramid, length)


@pytest.mark.parametrize("schedule", ["linear", "geometric"])
def test_a_table_ends_where_all_longer_prompts_are_alike(schedule):
    pyramid = Pyramid(schedule=schedule)
    table = count_table(pyramid, 100, layers=12, fewest=12, max_length=3000)
    whole = pyramid.counts(100, np.arange(3001), layers=12, fewest=12)
    assert table.shape[1] < 1500
    np.testing.assert_array_equal(table[:, np.minimum(np.arange(3001), table.shape[1] - 1)], whole)


@pytest.mark.parametrize("budget", [64, 96, 128])
def test_the_authors_arithmetic_overshoots_and_ours_does_not(budget):
    theirs = sum(counts(Pyramid(variant="authors"), budget, 8000, 32, 8)) / 32
    assert 1.04 < theirs / budget < 1.12
    assert sum(counts(Pyramid(), budget, 8000, 32, 8)) == 32 * budget


POLICY = PyramidKV(budget=32, window=8, sinks=4, kernel=3)


@pytest.fixture(scope="module")
def turns(tiny):
    """Two rows of a prompt, and a second turn, on four layers."""
    rng = np.random.default_rng(5)
    # The long row has every layer's share; the short one is clamped in the first two layers.
    prompt = [rng.integers(0, 512, 90).tolist(), rng.integers(0, 512, 40).tolist()]
    _, first = kvjax.prefill(tiny, prompt, policy=POLICY, max_new_tokens=3)
    logits, second = kvjax.extend(tiny, first, [[7, 8, 9], rng.integers(0, 512, 12).tolist()])
    return tiny, first, logits, second


def lengths(cache: kvjax.Cache) -> list[list[int]]:
    """Tokens that the rows' heads hold, [layer][row]; all heads of a layer hold as many."""
    held = np.stack([np.asarray(state.lengths) for state in cache.layers])
    assert (held == held[:, :, :1]).all()
    return held[:, :, 0].tolist()


def test_every_layer_and_row_has_its_own_length(turns):
    _, first, _, second = turns
    # Outside 12 tokens the mean is 20: from 39 to 1 in steps of 12.67: 51, 38.33, 25.67, 13.
    unclamped = [51, 38, 26, 13]
    assert [layer[0] for layer in lengths(first)] == unclamped
    assert [layer[0] for layer in lengths(second)] == unclamped
    # 40 tokens: the first layer's 11 too many go to the others in equal parts of 3.67; of the second layer's,
    # which has room for 1.67 only, 2 are shared again: 40, 40, 30.33, 17.67.
    assert [layer[1] for layer in lengths(first)] == counts(Pyramid(), 32, 40, 4, 12) == [40, 40, 30, 18]
    for cache in (first, second):
        for row in range(2):
            assert sum(layer[row] for layer in lengths(cache)) == 4 * 32


def test_every_layer_has_its_own_shape(turns):
    tiny, first, _, _ = turns
    slots = [state.positions.shape[1] for state in first.layers]
    assert len(set(slots)) == 4
    for state, spec, layer in zip(first.layers, first.specs, lengths(first), strict=True):
        assert whole_rows(state, spec).shape == (2, sum(spec.slots), 2 * tiny.spec.head_dim)
        assert min(spec.slots) >= max(layer) + 3


def test_a_second_turn_goes_on_where_the_first_stopped(turns):
    """Broken by: one mask for all layers, which crashes where their lengths differ (kvpress)."""
    tiny, _, logits, second = turns
    assert np.isfinite(logits).all()
    assert second.next_position.tolist() == [93, 52]
    for layer in kvjax.kept_positions(second):
        for row, end in enumerate((93, 52)):
            for head in layer[row]:
                assert set(range(end - 8, end)) | set(range(4)) <= set(head.tolist())
    again, _ = kvjax.decode(tiny, second, np.asarray([1, 2]), donate=False)
    assert np.isfinite(again).all()


def test_a_rows_lengths_do_not_depend_on_its_batch(turns):
    tiny, first, _, _ = turns
    prompt = np.random.default_rng(5).integers(0, 512, 90).tolist()
    _, alone = kvjax.prefill(tiny, prompt, policy=POLICY, max_new_tokens=3)
    assert [layer[0] for layer in lengths(alone)] == [layer[0] for layer in lengths(first)]


def test_a_long_prompts_cache_has_the_budgets_slots(tiny):
    """Broken by: slots for shorter prompts, which give the upper layers more, where there is none."""
    prompt = np.random.default_rng(5).integers(0, 512, 90)
    _, cache = kvjax.prefill(tiny, prompt, policy=POLICY, max_new_tokens=3)
    assert sum(spec.slots[0] for spec in cache.specs) == 4 * (32 + 3)
    assert kvjax.cache_bytes(cache) <= kvjax.cache_bytes(
        kvjax.prefill(tiny, prompt, policy=kvjax.SnapKV(budget=32, window=8, kernel=3), max_new_tokens=3)[1]
    )


def test_presets_are_the_papers_the_authors_and_kvpresss_settings():
    assert PyramidKV(budget=64).allocation == Pyramid(beta=20, schedule="linear", variant="exact")
    paper, authors = PyramidKV.paper(budget=64), PyramidKV.authors(budget=64)
    assert (paper.window, paper.kernel, paper.pooling, paper.sinks) == (8, 7, "max", 0)
    assert (authors.window, authors.kernel, authors.pooling, authors.sinks) == (8, 5, "avg", 0)
    assert authors.allocation == Pyramid(variant="authors")
    press = PyramidKV.kvpress(compression_ratio=0.75, window_size=16, kernel_size=7, beta=10)
    assert (press.budget, press.window, press.kernel, press.pooling, press.sinks) == (0.25, 16, 7, "avg", 0)
    assert press.allocation == Pyramid(beta=10, variant="kvpress")
    assert press.group_order == "after_pooling"
    assert PyramidKV.with_schedule(budget=64, beta=5, schedule="geometric").allocation == Pyramid(
        beta=5, schedule="geometric"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"beta": 0.5}, r"`beta` must be at least 1, got 0.5"),
        ({"beta": float("nan")}, r"`beta` must be at least 1, got nan"),
        ({"schedule": "cosine"}, r'`schedule` must be "linear" or "geometric", got \'cosine\''),
        ({"variant": "mine"}, r'`variant` must be "exact" or "authors" or "kvpress", got \'mine\''),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_rejects_settings_that_cannot_be(setting, message):
    with pytest.raises(ValueError, match=message):
        Pyramid(**setting)


def test_an_equal_pyramid_is_the_same_static_argument():
    traced = []
    run = jax.jit(traced.append, static_argnums=0)
    for _ in range(2):
        run(Pyramid(beta=7))
    assert len(traced) == 1


@pytest.mark.parametrize("variant", ["exact", "authors", "kvpress"])
def test_a_long_prompt_gets_a_pyramid_whatever_the_variant(variant):
    """Broken by: a table of counts that ends before the arithmetic of long prompts begins."""
    policy = PyramidKV(budget=408, window=8, sinks=0, allocation=Pyramid(variant=variant))
    model = kvjax.ModelSpec(
        num_layers=4,
        num_query_heads=2,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=8,
        max_positions=8192,
        dtype="float32",
        rope=Rope(head_dim=4),
    )
    seen = jnp.full((1, 2), 5000, jnp.int32)
    held = [int(policy.counts(spec, seen)[0, 0]) for spec in policy.layer_specs(model, 5120, 4)]
    assert held == counts(Pyramid(variant=variant), 408, 5000, 4, 8)
    assert held[0] > 700
    assert held[3] < 50
