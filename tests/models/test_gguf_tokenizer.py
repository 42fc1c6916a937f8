"""GGUF's tokenizers: ends of turns, templates and damaged metadata."""

import json
import pathlib

import pytest

from kvjax_models.gguf_stop_tokens import end_of_turn_ids
from kvjax_models.gguf_tokenizer import tokenizer_from_gguf

FILE = pathlib.Path("model.gguf")
TOKENS = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab"]
METADATA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
}


def build(**changes):
    changes = {f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}
    tokenizer = tokenizer_from_gguf(METADATA | changes, file=FILE)
    assert tokenizer is not None
    return tokenizer


def test_ends_of_turns_are_found_by_what_they_are_called():
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "</s>", "<|start|>", "<|endoftext|>"]
    types = [1, 3, 3, 4, 1, 3, 3, 3]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    # Not the word of the vocabulary, nor the token for unknown text.
    assert end_of_turn_ids(metadata) == [1, 2, 3, 5, 7]
    assert end_of_turn_ids(metadata | {"tokenizer.ggml.unknown_token_id": 7}) == [1, 2, 3, 5]
    assert end_of_turn_ids({}) == end_of_turn_ids({"tokenizer.ggml.tokens": "ab"}) == []


def test_templates_and_special_tokens_of_a_file_are_known():
    names = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}"
    named = {"chat_templates": ["tool_use"], "chat_template.tool_use": "T"}
    tokenizer = build(chat_template=names, **{name.replace(".", "__"): value for name, value in named.items()})
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat) == "<s></s></s>"
    assert tokenizer.apply_chat_template(chat, tools=[]) == "T"
    with pytest.raises(ValueError, match=r"model.gguf: `tokenizer.chat_template` does not take these `messages`: Zero"):
        build(chat_template="{{ 1 / 0 }}").apply_chat_template(chat)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__tokens": "abcdefg"}, "`tokenizer.ggml.tokens` must be a list of strings"),
        ({"ggml__tokens": [1] * 7}, "`tokenizer.ggml.tokens` must be a list of strings"),
        ({"ggml__tokens": ["a" * 100_000, *TOKENS[:-1]], "ggml__token_type": [1] * 7}, "at most 512 characters each"),
        ({"ggml__token_type": [1]}, "`tokenizer.ggml.token_type` must have a value for each of the 7 tokens, got 1"),
        ({"ggml__token_type": 1}, "`tokenizer.ggml.token_type` must be a list of integers"),
        ({"ggml__scores": [1.0]}, "`tokenizer.ggml.scores` must be a finite number for each of the 7 tokens"),
        ({"ggml__scores": [float("nan")] * 7}, "`tokenizer.ggml.scores` must be a finite number for each"),
        ({"ggml__unknown_token_id": 7}, "`tokenizer.ggml.unknown_token_id` must be from 0 to 6, got 7"),
        ({"ggml__bos_token_id": -1}, "`tokenizer.ggml.bos_token_id` must be from 0"),
        ({"ggml__bos_token_id": 1.0}, "`tokenizer.ggml.bos_token_id` must be an integer, got 1.0"),
        ({"ggml__add_bos_token": 1}, "`tokenizer.ggml.add_bos_token` must be true or false, got 1"),
        ({"ggml__model": []}, r"`tokenizer.ggml.model` must be a string, got \[\]"),
        (
            {"ggml__model": "gpt2", "ggml__merges": ["ab"]},
            "`tokenizer.ggml.merges` must be of two parts each",
        ),
        ({"ggml__model": "gpt2", "ggml__merges": "a b"}, "`tokenizer.ggml.merges` must be a list of strings"),
        ({"ggml__model": "gpt2", "ggml__merges": [], "ggml__pre": 3}, "`tokenizer.ggml.pre` must be a string, got 3"),
        ({"chat_template": 3}, "`tokenizer.chat_template` must be a string, got 3"),
        ({"chat_templates": ["rag"]}, "`tokenizer.chat_template.rag` is missing"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_damaged_metadata_is_named(changes, message):
    with pytest.raises(ValueError, match=f"model.gguf: .*{message}|model.gguf is .*{message}"):
        build(**changes)
