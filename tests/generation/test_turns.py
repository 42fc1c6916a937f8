"""Later turns: the tokens of all calls are those of one conversation."""

import warnings

import jax
import numpy as np
import pytest

import kvjax
from kvjax import question
from kvjax.conversation import continued_ids

NEW = 4
# As the template of the fixture's tokenizer renders it: 401 and 402 open messages, 2 3 ends them.
FIRST, SECOND, THIRD = "10 11 12", "20 21", "30"


def rendered(tokenizer, messages) -> list[int]:
    return tokenizer.encode(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True), add_special_tokens=False
    )


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def prompts(monkeypatch):
    """Records the rows that every prompt comes to."""
    rows, batch_of = [], question.batch_of
    monkeypatch.setattr(question, "batch_of", lambda row: rows.append(row[0].tolist()) or batch_of(row))
    return rows


def test_a_text_behind_a_cache_has_no_token_that_begins_a_text(model, words, prompts):
    first = kvjax.generate(model, FIRST, tokenizer=words, max_new_tokens=NEW)
    kvjax.generate(model, SECOND, tokenizer=words, max_new_tokens=NEW, cache=first.cache)
    assert prompts == [[1, 10, 11, 12], [20, 21]]


@pytest.mark.parametrize("system", [None, "9 9"])
def test_a_chat_behind_a_cache_is_the_turn_behind_the_answer(model, chat_words, prompts, system):
    """Broken by: a second system prompt and beginning, or an end of the answer that is missing or stands twice."""
    chat = [] if system is None else [{"role": "system", "content": system}]
    chat.append(user(FIRST))
    first = kvjax.generate(model, chat, tokenizer=chat_words, max_new_tokens=NEW)
    assert first.finish_reasons == ["length"]
    answer = first.tokens[0].tolist()
    kvjax.generate(model, [user(SECOND)], tokenizer=chat_words, max_new_tokens=NEW, cache=first.cache)
    whole = [*chat, {"role": "assistant", "content": chat_words.decode(answer).strip()}, user(SECOND)]
    assert [*prompts[0], *answer, *prompts[1]] == rendered(chat_words, whole)


def test_the_end_of_an_answer_that_stopped_by_it_stands_once(model, chat_words):
    for last, wanted in ((2, [3]), (50, [2, 3]), (3, [2, 3])):
        ids = continued_ids([user(SECOND)], chat_words, last_token=last)
        assert ids.tolist() == [*wanted, 401, 20, 21, 2, 3, 402], last
    # A stop token of the caller's that the template writes too, special or not.
    chat_words.apply_chat_template = lambda messages, add_generation_prompt: (
        "".join(f"401 {message['content']} 60 61 " for message in messages) + "401 " * add_generation_prompt
    )
    for last, wanted in ((60, [61]), (50, [60, 61])):
        ids = continued_ids([user(SECOND)], chat_words, last_token=last, stops=(60,))
        assert ids.tolist()[: len(wanted) + 1] == [*wanted, 401]


def test_a_cache_knows_its_last_token_from_every_step(model, chat_words):
    _, cache = kvjax.prefill(model, [5, 6, 7], policy=kvjax.Full(), max_new_tokens=NEW)
    assert cache.known is not None
    assert cache.known.last_tokens.tolist() == [7]
    _, cache = kvjax.decode(model, cache, [2])
    _, cache = kvjax.decode(model, cache, [-1])
    assert cache.known is not None
    assert cache.known.last_tokens.tolist() == [2]
    unknown = jax.tree.map(lambda x: x, cache)
    with pytest.raises(ValueError, match=r"`cache` does not tell how its last answer ended"):
        kvjax.generate(model, [user(SECOND)], tokenizer=chat_words, max_new_tokens=NEW, cache=unknown)
    assert kvjax.generate(model, SECOND, tokenizer=chat_words, max_new_tokens=NEW, cache=unknown).lengths == [NEW]


class Forgetful:
    """A template that leaves out all turns but the newest."""

    def __init__(self, tokenizer):
        self.encode, self.decode, self._render = tokenizer.encode, tokenizer.decode, tokenizer.apply_chat_template

    def apply_chat_template(self, messages, *, add_generation_prompt):
        return self._render(messages[-1:], add_generation_prompt=add_generation_prompt)


def test_what_a_cache_cannot_go_on_with_is_one_sentence(model, chat_words):
    cache = kvjax.generate(model, [user(FIRST)], tokenizer=chat_words, max_new_tokens=NEW).cache
    wrong = {
        r"a chat must be its new messages only, got one with an assistant's": (
            chat_words,
            [user(FIRST), {"role": "assistant", "content": "5"}, user(SECOND)],
        ),
        r"a chat template that rewrites earlier turns": (Forgetful(chat_words), [user(SECOND)]),
        r"leaves out a message of the role 'system'": (
            chat_words,
            [{"role": "system", "content": "499 498"}, user("5")],
        ),
    }
    render = chat_words.apply_chat_template
    for message, (tokenizer, messages) in wrong.items():
        if "system" in message:
            chat_words.apply_chat_template = lambda messages, add_generation_prompt: render(
                [m for m in messages if m["role"] != "system"], add_generation_prompt=add_generation_prompt
            )
        with pytest.raises(ValueError, match=message):
            kvjax.generate(model, messages, tokenizer=tokenizer, max_new_tokens=NEW, cache=cache)


# --- kvjax.Chat ---


@pytest.mark.parametrize("system", [None, "9 9"])
def test_the_tokens_of_three_turns_are_those_of_one_rendering(model, chat_words, system):
    chat = kvjax.Chat(model, chat_words, system=system, max_new_tokens=NEW)
    results = [chat.say(text) for text in (FIRST, SECOND)]
    results.append(chat.say(THIRD, callback=lambda new: None))
    assert [m["content"] for m in chat.messages if m["role"] == "assistant"] == [r.text for r in results]
    whole = rendered(chat_words, chat.messages[:-1])
    assert chat.tokens.tolist() == [*whole, *results[-1].tokens[0].tolist()]
    assert chat.cache is results[-1].cache
    assert chat.cache is not None
    assert chat.cache.next_position.tolist() == [len(chat.tokens)]
    assert chat.stats is results[-1].stats
    # With the full cache, the answer is the one to a prompt of the whole conversation.
    np.testing.assert_array_equal(kvjax.generate(model, whole, max_new_tokens=NEW).tokens, results[-1].tokens)


def test_a_stream_gives_the_text_in_pieces_and_counts_once_it_is_read(model, chat_words):
    told, asked = (kvjax.Chat(model, chat_words, max_new_tokens=NEW) for _ in range(2))
    stream = told.say(FIRST, stream=True)
    pieces = [next(stream)]
    assert (told.messages, told.cache, told.stats) == ([], None, None)
    pieces += stream
    assert len(pieces) > 1
    assert "".join(pieces) == asked.say(FIRST).text
    assert told.messages == asked.messages


def test_a_turn_that_fails_or_is_interrupted_leaves_the_conversation_as_it_was(model, chat_words):
    chat = kvjax.Chat(model, chat_words, policy=kvjax.SnapKV(budget=12, window=2), max_new_tokens=NEW)
    chat.say(FIRST)
    before = (chat.messages, chat.cache, chat.stats, chat.tokens.tolist())

    def interrupt(new):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.say(SECOND, callback=interrupt)
    with pytest.raises(ValueError, match="lone surrogate"):
        chat.say("5 \ud800")
    abandoned = chat.stream(SECOND)
    next(abandoned)
    assert (chat.messages, chat.cache, chat.stats, chat.tokens.tolist()) == before
    undisturbed = kvjax.Chat(model, chat_words, policy=kvjax.SnapKV(budget=12, window=2), max_new_tokens=NEW)
    undisturbed.say(FIRST)
    assert chat.say(SECOND).text == undisturbed.say(SECOND).text
    with pytest.raises(ValueError, match="another turn was answered before this one was read to its end"):
        list(abandoned)


def test_a_template_that_rewrites_earlier_turns_is_read_anew(model, chat_words):
    chat = kvjax.Chat(model, Forgetful(chat_words), max_new_tokens=NEW)
    chat.say(FIRST)
    with pytest.warns(kvjax.RereadWarning, match="reading the whole conversation anew"):
        again = chat.say(SECOND)
    np.testing.assert_array_equal(
        again.tokens, kvjax.generate(model, [user(SECOND)], tokenizer=chat_words, max_new_tokens=NEW).tokens
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvjax.Chat(model, chat_words, max_new_tokens=NEW).say(FIRST)


@pytest.mark.usefixtures("no_shape_checks")
def test_says_what_a_chat_cannot_be_made_of(model, words, chat_words):
    with pytest.raises(ValueError, match=r"a chat needs a `tokenizer` with a chat template, got none"):
        kvjax.Chat(model, words)
    with pytest.raises(ValueError, match=r"`Chat` has no setting `budget`: those of `generate` are max_new_tokens"):
        kvjax.Chat(model, chat_words, budget=5)
    with pytest.raises(ValueError, match=r"`top_k` must be an integer of at least 1, got 0"):
        kvjax.Chat(model, chat_words, top_k=0)
    with pytest.raises(ValueError, match=r"`text` must be what the user says, got \["):
        kvjax.Chat(model, chat_words).say([user(FIRST)])  # pyright: ignore[reportArgumentType, reportCallIssue]
