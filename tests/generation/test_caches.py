"""The cache after an answer, and the same steps by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.decoding
import kvjax.prompts
import kvjax.steps
from kvjax.state import whole_rows

NEW = 8
RNG = np.random.default_rng(5)
# All fit one bucket of 16 tokens, so that few shapes are compiled.
LONG, SHORT, WHOLE = (RNG.integers(3, 512, length).tolist() for length in (14, 3, 16))
MORE = RNG.integers(3, 512, 11).tolist()

run = functools.partial(kvjax.generate, max_new_tokens=NEW, stop_tokens=())


POLICIES = ("full", "streaming_llm", "streaming_llm_masked", "snapkv", "h2o")

each_policy = pytest.mark.parametrize("policy", POLICIES, indirect=True)


def test_the_cache_holds_the_prompt_and_every_returned_token(model):
    result = run(model, [SHORT, LONG])
    assert result.cache.next_position.tolist() == [3 + NEW, 14 + NEW]
    for layer in kvjax.kept_positions(result.cache):
        for row, end in enumerate((3 + NEW, 14 + NEW)):
            for head in layer[row]:
                np.testing.assert_array_equal(head, np.arange(end))


def test_a_second_prompt_goes_on_where_the_first_answer_ended(model):
    first = run(model, LONG)
    # Twice: the cache of a result stays valid.
    second, again = (run(model, MORE, cache=first.cache) for _ in range(2))
    whole = run(model, [*LONG, *first.tokens[0].tolist(), *MORE])
    np.testing.assert_array_equal(second.tokens, whole.tokens)
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    assert second.stats.prompt_tokens == (11,)
    assert second.stats.seen_tokens == 14 + NEW + 11 + NEW


def test_rows_of_a_second_prompt_may_have_different_lengths(model):
    first = run(model, [SHORT, LONG])
    second = run(model, [MORE, SHORT], cache=first.cache)
    for row, (prompt, more) in enumerate([(SHORT, MORE), (LONG, SHORT)]):
        whole = run(model, [*prompt, *first.tokens[row].tolist(), *more])
        np.testing.assert_array_equal(second.tokens[row], whole.tokens[0])


def test_chunks_give_what_one_prompt_gives(model):
    tokens = [*LONG, *MORE]
    whole, _ = kvjax.prefill(model, tokens, policy=kvjax.Full(), max_new_tokens=1, logits="all")
    logits, cache = kvjax.prefill(model, tokens[:7], policy=kvjax.Full(), max_new_tokens=1, logits="all")
    np.testing.assert_allclose(logits[0, :7], whole[0, :7], atol=1e-4)
    for start, end in ((7, 8), (8, 20), (20, 25)):
        logits, cache = kvjax.extend(model, cache, tokens[start:end], logits="all")
        np.testing.assert_allclose(logits[0, : end - start], whole[0, start:end], atol=1e-4)
    assert cache.next_position.tolist() == [25]


def test_the_last_logits_are_those_of_each_rows_last_token(model):
    every, _ = kvjax.prefill(model, [SHORT, LONG], policy=kvjax.Full(), max_new_tokens=NEW, logits="all")
    last, _ = kvjax.prefill(model, [SHORT, LONG], policy=kvjax.Full(), max_new_tokens=NEW)
    assert every.shape == (2, 16, 512)
    assert last.dtype == jnp.float32
    np.testing.assert_allclose(last, [every[0, 2], every[1, 13]], atol=1e-5)


def test_positions_go_on_at_the_true_length_whatever_has_gone(model, policy_of):
    _, cache = kvjax.prefill(model, [SHORT, LONG], policy=policy_of("snapkv", 10), max_new_tokens=NEW)
    _, cache = kvjax.extend(model, cache, [MORE, MORE[:5]])
    assert cache.next_position.tolist() == [14, 19]
    assert cache.room == NEW
    for layer in kvjax.kept_positions(cache):
        for row, end in enumerate((14, 19)):
            for head in layer[row]:
                assert len(head) == 10
                np.testing.assert_array_equal(head[-4:], np.arange(end - 4, end))
    _, cache = kvjax.decode(model, cache, [5, 6])
    assert [int(layer.positions.max()) for layer in cache.layers] == [19, 19]


@each_policy
def test_prefill_and_decode_by_hand_are_generate(model, policy):
    result = run(model, [SHORT, LONG], policy=policy)
    logits, cache = kvjax.prefill(model, [SHORT, LONG], policy=policy, max_new_tokens=NEW)
    for step in range(NEW):
        token = jnp.argmax(logits, axis=-1)
        np.testing.assert_array_equal(token, result.tokens[:, step])
        logits, cache = kvjax.decode(model, cache, token)
    assert kvjax.cache_bytes(cache) == kvjax.cache_bytes(result.cache)
    for spec, by_hand, looped in zip(cache.specs, cache.layers, result.cache.layers, strict=True):
        np.testing.assert_array_equal(by_hand.positions, looped.positions)
        np.testing.assert_allclose(whole_rows(by_hand, spec), whole_rows(looped, spec), atol=1e-5)


@pytest.fixture
def filled(model):
    """A cache with all slots taken in row 1, whose prompt fills its bucket."""
    _, cache = kvjax.prefill(model, [SHORT, WHOLE], policy=kvjax.Full(), max_new_tokens=NEW)
    for _ in range(NEW):
        logits, cache = kvjax.decode(model, cache, [5, 6])
        assert np.isfinite(logits).all()
    return cache


def test_writing_past_capacity_is_an_error_and_extend_makes_room(model, filled):
    message = r"the cache has no slot left for row 1: it was made with `max_new_tokens=8`; .*`kvjax.extend`"
    with pytest.raises(ValueError, match=message):
        kvjax.decode(model, filled, [5, 6])
    # A row that stands still needs no slot.
    _, cache = kvjax.decode(model, filled, [5, -1], donate=False)
    assert cache.next_position.tolist() == [12, 24]
    _, cache = kvjax.extend(model, filled, [[7], [8]], max_new_tokens=2)
    logits, cache = kvjax.decode(model, cache, [5, 6])
    assert np.isfinite(logits).all()
    assert cache.next_position.tolist() == [13, 26]


def test_under_jit_writing_past_capacity_gives_nan(model, filled):
    decode = jax.jit(lambda params, cache, token: kvjax.decode(params, cache, token, donate=False))
    logits, after = decode(model, filled, jnp.asarray([5, 6], jnp.int32))
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()
    rows, rows_after = (whole_rows(cache.layers[0], cache.specs[0]) for cache in (filled, after))
    np.testing.assert_array_equal(rows[1], rows_after[1])


def test_a_negative_token_leaves_its_row_as_it_is(model):
    _, cache = kvjax.prefill(model, [SHORT, LONG], policy=kvjax.Full(), max_new_tokens=NEW)
    _, after = kvjax.decode(model, cache, [-1, 7], donate=False)
    assert after.next_position.tolist() == [3, 15]
    for before_layer, after_layer in zip(cache.layers, after.layers, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[0]), before_layer, after_layer)


def test_a_donated_cache_is_gone_and_one_that_is_not_stays(model):
    _, cache = kvjax.prefill(model, [SHORT, LONG], policy=kvjax.Full(), max_new_tokens=NEW)
    # A copy: a view would keep the buffer from being donated.
    before = jax.tree.map(np.array, cache.layers[0])
    kept, _ = kvjax.decode(model, cache, [5, 6], donate=False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    jax.tree.map(np.testing.assert_array_equal, cache.layers[0], before)
    donated, after = kvjax.decode(model, cache, [5, 6])
    np.testing.assert_array_equal(kept, donated)
    assert all(leaf.is_deleted() for layer in cache.layers for leaf in jax.tree.leaves(layer.kv))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))
