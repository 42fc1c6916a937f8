"""`kvjax generate --chat`: turns over one growing cache."""

import pytest

import kvjax
from kvjax.cli import chat
from kvjax.conversation import continued_ids

pytestmark = pytest.mark.smollm2

TURNS = ("My name is Ada.", "Say it in French.")


def fresh_answers(smollm2):
    """Each turn answered from the whole conversation, without a cache from before."""
    messages, texts = [], []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        result = kvjax.generate(smollm2.params, [messages], tokenizer=smollm2.tokenizer, max_new_tokens=16)
        assert result.texts is not None
        texts.append(result.texts[0])
        messages.append({"role": "assistant", "content": result.texts[0]})
    return texts


def test_turns_over_one_cache_give_what_the_whole_conversation_gives(generate, smollm2):
    lines = "\n\n".join(TURNS).encode() + b"\n /exit \nnot read\n"
    result = generate("--chat", "--max-new-tokens", "16", stdin=lines)
    assert result.code == 0
    assert result.out == "".join(f"{text}\n" for text in fresh_answers(smollm2))
    first, second = result.err.splitlines()
    assert cache_size(first) < cache_size(second)


def test_a_prompt_is_the_first_turn_and_the_chat_ends_with_stdin(generate, smollm2):
    result = generate("--chat", "--max-new-tokens", "16", TURNS[0], stdin=TURNS[1].encode())
    assert result.code == 0
    assert result.out == "".join(f"{text}\n" for text in fresh_answers(smollm2))


def test_the_tokens_of_a_chat_are_those_of_one_rendering(smollm2):
    talk = kvjax.Chat(smollm2.params, smollm2.tokenizer, max_new_tokens=16)
    answers = [talk.say(text) for text in TURNS]
    assert [answer.text for answer in answers] == fresh_answers(smollm2)
    seen, last = talk.tokens, int(answers[1].lengths[0])
    whole = smollm2.tokenizer.apply_chat_template(talk.messages[:-1])
    assert seen[: len(seen) - last].tolist() == smollm2.tokenizer.encode(whole, add_special_tokens=False)
    # And of a third turn, whether the answer before it ended by itself or not.
    third = {"role": "user", "content": "Thanks!"}
    (end,) = smollm2.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    whole = smollm2.tokenizer.apply_chat_template([*talk.messages, third])
    ids = smollm2.tokenizer.encode(whole, add_special_tokens=False)
    stopped = continued_ids([third], smollm2.tokenizer, last_token=end)
    unstopped = continued_ids([third], smollm2.tokenizer, last_token=int(seen[-1]))
    assert unstopped.tolist() == [end, *stopped.tolist()] or int(seen[-1]) == end
    assert ids[-len(stopped) :] == stopped.tolist()
    assert ids[-len(stopped) - 1] == end


def test_an_interrupted_turn_is_forgotten(small, run, monkeypatch):
    """And the next one is answered as if it had not been."""
    del small
    say, turns = kvjax.Chat.say, []

    def interrupted_once(talk, text, *, callback):
        turns.append((text, talk.messages))

        def interrupt(new):
            if text == TURNS[0]:
                raise KeyboardInterrupt
            callback(new)

        return say(talk, text, callback=interrupt)

    monkeypatch.setattr(kvjax.Chat, "say", interrupted_once)
    options = ("--chat", "--max-new-tokens", "4")
    # What is piped ends with the interrupt; at a terminal the chat goes on.
    assert run("generate", *options, stdin=TURNS[0].encode()).code == 130
    lines = iter(TURNS)
    monkeypatch.setattr(chat, "_turns", lambda: lines)
    monkeypatch.setattr(chat, "_at_terminal", lambda: True)
    result = run("generate", *options)
    assert result.code == 0
    assert "kvjax: stopped, and this turn forgotten; Ctrl-C again or Ctrl-D leaves\n" in result.err
    assert turns[1:] == [(TURNS[0], []), (TURNS[1], [])]


def test_a_ring_that_is_not_full_is_told_to_be_of_fixed_size(small, run):
    del small
    argv = ("generate", "Hi.", "--max-new-tokens", "4", "--policy", "streaming-llm", "--budget")
    assert ", of fixed size; a full one would have " in run(*argv, "300").err
    assert " full (" in run(*argv, "16").err


def cache_size(line):
    return float(line.split("cache ")[1].split()[0])
