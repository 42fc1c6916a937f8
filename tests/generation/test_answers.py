"""Answers of batches, where they end, and how they come."""

import functools
from typing import Any

import numpy as np
import pytest

import kvjax
import kvjax.decoding
import kvjax.prompts
import kvjax.steps

NEW = 8
RNG = np.random.default_rng(5)
# All fit one bucket of 16 tokens, so that few shapes are compiled.
LONG, SHORT, WHOLE = (RNG.integers(3, 512, length).tolist() for length in (14, 3, 16))
MORE = RNG.integers(3, 512, 11).tolist()

run = functools.partial(kvjax.generate, max_new_tokens=NEW, stop_tokens=())


POLICIES = ("full", "streaming_llm", "streaming_llm_masked", "snapkv", "h2o")

each_policy = pytest.mark.parametrize("policy", POLICIES, indirect=True)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 3}], ids=["greedy", "sampled"])
@each_policy
def test_rows_of_different_lengths_give_what_each_gives_alone(model, policy, sampling):
    together = run(model, [SHORT, LONG], policy=policy, **sampling)
    for row, prompt in enumerate([SHORT, LONG]):
        # Row b draws with seed + b.
        own = {**sampling, "seed": sampling["seed"] + row} if sampling else {}
        alone = run(model, prompt, policy=policy, **own)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        for layer in range(2):
            for head in range(2):
                np.testing.assert_array_equal(
                    kvjax.kept_positions(together.cache)[layer][row][head],
                    kvjax.kept_positions(alone.cache)[layer][0][head],
                )


@pytest.mark.parametrize("name", POLICIES)
def test_with_room_for_everything_the_tokens_are_fulls(model, name, policy_of):
    prompts = [SHORT, LONG]
    np.testing.assert_array_equal(run(model, prompts, policy=policy_of(name, 22)).tokens, run(model, prompts).tokens)


def test_a_small_budget_gives_other_tokens(model, policy_of):
    full = run(model, [SHORT, LONG]).tokens
    for name in ("streaming_llm", "streaming_llm_masked", "snapkv"):
        tokens = run(model, [SHORT, LONG], policy=policy_of(name, 10)).tokens
        assert (tokens[1] != full[1]).any()


def test_a_stop_token_ends_its_row_while_others_go_on(model):
    free = run(model, [LONG, SHORT])
    stop = int(free.tokens[0, 2])
    assert stop not in free.tokens[0, :2]
    assert stop not in free.tokens[1]
    result = run(model, [LONG, SHORT], stop_tokens=[stop])
    assert result.lengths.tolist() == [3, NEW]
    assert result.finish_reasons == ["stop", "length"]
    np.testing.assert_array_equal(result.tokens[0], [*free.tokens[0, :3], 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(result.tokens[1], free.tokens[1])
    # The cache of the row that ended stands still; it holds the stop token too.
    assert result.cache.next_position.tolist() == [17, 11]
    for layer in kvjax.kept_positions(result.cache):
        for row, end in enumerate((17, 11)):
            for head in layer[row]:
                np.testing.assert_array_equal(head, np.arange(end))
    assert result.stats.new_tokens == (3, NEW)


@pytest.mark.usefixtures("no_shape_checks")
def test_stop_tokens_may_be_a_number_or_an_array(model):
    stop = int(run(model, [LONG, SHORT]).tokens[0, 2])
    forms: list[Any] = [stop, np.int64(stop), (stop,), np.asarray([stop])]
    for form in forms:
        assert run(model, [LONG, SHORT], stop_tokens=form).lengths.tolist() == [3, NEW]


def test_the_models_own_stop_tokens_hold_unless_others_are_given(model, cut):
    free = run(model, LONG)
    stop = int(free.tokens[0, 1])
    ends = cut(model, eos_token_ids=(511, stop))
    result = kvjax.generate(ends, LONG, max_new_tokens=NEW)
    assert result.lengths.tolist() == [2]
    assert result.finish_reasons == ["stop"]
    assert result.tokens[0].tolist() == [*free.tokens[0, :2], 0, 0, 0, 0, 0, 0]
    on = run(ends, LONG)
    assert on.lengths.tolist() == [NEW]
    assert on.finish_reasons == ["length"]
    np.testing.assert_array_equal(on.tokens, free.tokens)


def test_an_answer_that_ends_with_a_stop_token_at_full_length_was_stopped(model):
    last = int(run(model, LONG).tokens[0, -1])
    result = run(model, LONG, stop_tokens=last)
    assert result.lengths.tolist() == [NEW]
    assert result.finish_reasons == ["stop"]


def test_stop_strings_end_a_row_and_are_not_in_its_text(model, words):
    free = run(model, [LONG, SHORT])
    stop = f" {free.tokens[0, 2]} {free.tokens[0, 3]}"
    result = run(model, [LONG, SHORT], tokenizer=words, stop_strings=stop)
    assert result.lengths.tolist() == [4, NEW]
    assert result.finish_reasons == ["stop", "length"]
    assert result.texts == [f"{free.tokens[0, 0]} {free.tokens[0, 1]}", words.decode(free.tokens[1])]
    assert result.tokens[0].tolist() == [*free.tokens[0, :4], 0, 0, 0, 0]
    assert result.cache.next_position.tolist() == [18, 11]


def test_a_callback_sees_every_token_and_the_text_as_it_comes(model, words):
    seen = []
    free = run(model, [LONG, SHORT], tokenizer=words)
    stop = int(free.tokens[0, 2])
    result = run(model, [LONG, SHORT], tokenizer=words, stop_tokens=stop, callback=seen.append)
    assert free.texts == [words.decode(row) for row in free.tokens]
    assert len(seen) == NEW
    tokens = np.stack([new.tokens for new in seen], axis=1)
    np.testing.assert_array_equal(tokens[0], [*free.tokens[0, :3], *[-1] * (NEW - 3)])
    np.testing.assert_array_equal(tokens[1], free.tokens[1])
    assert ["".join(new.texts[row] for new in seen) for row in range(2)] == result.texts
    assert result.texts == [words.decode(row[:length]) for row, length in zip(free.tokens, (3, NEW), strict=True)]
    without = []
    run(model, [LONG, SHORT], callback=without.append)
    assert all(new.texts is None for new in without)
    np.testing.assert_array_equal(np.stack([new.tokens for new in without], axis=1), free.tokens)


def test_text_that_was_held_back_for_a_stop_string_comes_at_the_end(model, words):
    seen = []
    result = run(model, SHORT, tokenizer=words, stop_strings=["never in there"], callback=seen.append)
    assert result.texts == ["".join(new.texts[0] for new in seen)] == [words.decode(result.tokens[0])]
