"""`kvjax generate --chat`: turns over one growing cache."""

import contextlib

import pytest

import kvjax
from kvjax.cli.conversation import Conversation

pytestmark = pytest.mark.smollm2

TURNS = ("My name is Ada.", "Say it in French.")


@pytest.fixture
def prompts(monkeypatch):
    """Records the prompts and caches that `kvjax.generate` is given, and interrupts it."""

    @contextlib.contextmanager
    def recording():
        given = []

        def record(params, prompt, **settings):
            given.append((prompt, settings["cache"]))
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(kvjax, "generate", record)
            yield given

    return recording


def ignore(piece):
    del piece


def talk(smollm2, *, tokenizer=None, notes=None, **settings):
    loaded = smollm2 if tokenizer is None else smollm2._replace(tokenizer=tokenizer)
    return Conversation(
        loaded,
        policy=kvjax.Full(),
        system=None,
        raw=False,
        settings={"max_new_tokens": 16, **settings},
        note=(notes if notes is not None else []).append,
    )


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


def test_later_turns_read_only_what_is_new(smollm2):
    notes = []
    conversation = talk(smollm2, notes=notes)
    first = conversation.answer(TURNS[0], show=ignore)
    second = conversation.answer(TURNS[1], show=ignore)
    seen = int(first.result.cache.next_position[0])
    added = second.result.stats.prompt_tokens[0]
    assert added < seen
    assert int(second.result.cache.next_position[0]) == seen + added + int(second.result.lengths[0])
    assert notes == []


def test_a_stop_string_does_not_break_the_cache(smollm2, prompts):
    notes = []
    conversation = talk(smollm2, notes=notes, stop_strings=("Ada",))
    first = conversation.answer(TURNS[0], show=ignore)
    assert first.result.finish_reasons == ["stop"]
    with prompts() as given, pytest.raises(KeyboardInterrupt):
        conversation.answer(TURNS[1], show=ignore)
    ((_, cache),) = given
    assert cache is first.result.cache
    assert notes == []


def test_a_template_that_rewrites_earlier_turns_starts_anew(smollm2):
    class Forgetful(type(smollm2.tokenizer)):
        """Leaves out all turns but the newest."""

        def apply_chat_template(self, messages, add_generation_prompt=True):
            return super().apply_chat_template(messages[-1:], add_generation_prompt)

    known = smollm2.tokenizer
    tokenizer = Forgetful(known.backend, chat_template=known.chat_template, eos_token=known.eos_token)
    notes = []
    conversation = talk(smollm2, tokenizer=tokenizer, notes=notes)
    conversation.answer(TURNS[0], show=ignore)
    again = conversation.answer(TURNS[1], show=ignore)
    assert notes == ["the chat template has rewritten earlier turns: reading the whole conversation anew"]
    alone = kvjax.generate(smollm2.params, [{"role": "user", "content": TURNS[1]}], tokenizer=known, max_new_tokens=16)
    assert again.result.texts == alone.texts


def test_an_interrupted_answer_is_remembered_as_far_as_it_came(smollm2, prompts):
    conversation = talk(smollm2)
    shown = []

    def interrupt(piece):
        shown.append(piece)
        if len(shown) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.answer(TURNS[0], show=interrupt)
    with prompts() as given, pytest.raises(KeyboardInterrupt):
        conversation.answer(TURNS[1], show=ignore)
    said = smollm2.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": TURNS[0]},
            {"role": "assistant", "content": "".join(shown)},
            {"role": "user", "content": TURNS[1]},
        ]
    )
    assert given == [(smollm2.tokenizer.encode(said, add_special_tokens=False), None)]


def cache_size(line):
    return float(line.split("cache ")[1].split()[0])
