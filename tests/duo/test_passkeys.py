"""Prompts with passkeys: lengths, labels, depths, the chat template, and what does not fit."""

import numpy as np
import pytest

from kvjax.duo.passkeys import PasskeyPrompts


def rng(seed=0):
    return np.random.default_rng(seed)


def labelled(example, tokenizer):
    """What the labelled tokens are to be followed by."""
    assert not example.labels[-1]
    return tokenizer.decode(example.tokens[1:][example.labels[:-1]].tolist())


@pytest.mark.parametrize("length", [200, 301, 777])
def test_a_prompt_has_exactly_the_length_that_is_asked_for(words, haystack, length):
    example = PasskeyPrompts(words, haystack=haystack).example(length, rng())
    assert example.tokens.shape == example.labels.shape == (length,)
    assert (example.tokens.dtype, example.labels.dtype) == (np.int32, np.bool_)


def test_labels_mark_what_comes_before_each_passkey_token_of_the_answer_and_nothing_else(words, haystack):
    example = PasskeyPrompts(words, haystack=haystack, passkeys=4, size=5).example(400, rng(3))
    text = words.decode(example.tokens.tolist())
    assert example.labels.sum() == 4 * 5
    answer = text.rpartition("?")[2]
    asked = [part.partition(" :")[2].partition(" .")[0].strip() for part in answer.split("The passkey of")[1:]]
    assert labelled(example, words) == " ".join(asked)
    for key in asked:
        # Once in the text, once in the answer.
        assert text.count(f"is : {key} .") == 2


def test_passkeys_of_words_and_of_digits_lie_at_all_depths(words, haystack):
    prompts = PasskeyPrompts(words, haystack=haystack, passkeys=3, size=4)
    depths, digits = [], 0
    for seed in range(40):
        example = prompts.example(500, rng(seed))
        tokens = words.decode(example.tokens.tolist()).split()
        text = tokens[: tokens.index("?")]
        facts = [place for place, token in enumerate(text) if token == ":"]
        assert len(facts) == 3
        depths += [place / len(text) for place in facts]
        digits += sum(text[place + 1].isdigit() for place in facts)
    assert np.histogram(depths, bins=4, range=(0, 1))[0].min() > 15
    assert 40 < digits < 80


def test_the_same_generator_gives_the_same_prompt_and_another_another(words, haystack):
    prompts = PasskeyPrompts(words, haystack=haystack)
    first, again, other = (prompts.example(300, rng(seed)).tokens.tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_too_few_tokens_say_how_many_are_needed(words, haystack):
    prompts = PasskeyPrompts(words, haystack=haystack)
    with pytest.raises(ValueError, match=r"`min_length` must leave room for 5 passkeys.*take \d+ tokens; got 100"):
        prompts.example(100, rng())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"passkeys": 21}, "`passkeys` must be from 1 to 20, got 21"),
        ({"size": 0}, "`passkey_size` must be at least 1, got 0"),
        ({"haystack": " \n"}, "`haystack` must be a text of words, got none"),
    ],
)
def test_settings_that_cannot_be_are_errors(words, settings, message):
    with pytest.raises(ValueError, match=message):
        PasskeyPrompts(words, **settings)


@pytest.mark.smollm2
def test_the_chat_template_of_a_real_model_is_kept(smollm2):
    assert smollm2.tokenizer is not None
    example = PasskeyPrompts(smollm2.tokenizer).example(512, rng())
    text = smollm2.tokenizer.decode(example.tokens, skip_special_tokens=False)
    start = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": "Several passkeys"}])
    assert text.startswith(start.partition("<|im_end|>\n<|im_start|>assistant")[0])
    assert text.count("?<|im_end|>\n<|im_start|>assistant\nThe passkey of the ") == 1
    # The pieces are joined as the tokenizer would have split the whole, but for where the text was cut.
    again = smollm2.tokenizer.encode(text, add_special_tokens=False)
    assert len(set(enumerate(again[:60])) ^ set(enumerate(example.tokens[:60].tolist()))) == 0
    assert example.labels.sum() >= 5 * 6
