"""Tokenizers built from GGUF metadata and from Hugging Face's files, and chat templates."""

import datetime
import itertools
import json

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from kvjax_models.chat_template import render_chat
from kvjax_models.gguf_tokenizer import tokenizer_from_gguf
from kvjax_models.tokenizer import Tokenizer
from kvjax_models.tokenizer_files import save_tokenizer, tokenizer_from_folder

BYTES = sorted(ByteLevel.alphabet())
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
HELLO = [{"role": "user", "content": "Hello"}]


def byte_level(pre="gpt-2", *, merges=(), more=(), **settings):
    """A byte-level tokenizer whose merges are given as "left right"."""
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*BYTES, *merged, *more, "<begin>", "<end>", "<tool>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    return metadata | {f"tokenizer.{name.replace('__', '.')}": value for name, value in settings.items()}


def build(metadata, tmp_path):
    tokenizer = tokenizer_from_gguf(metadata, file=tmp_path / "model.gguf")
    assert tokenizer is not None
    return tokenizer


def pieces(tokenizer, text, **options):
    return [tokenizer.backend.id_to_token(token) for token in tokenizer.encode(text, **options)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("gpt-2", ["123"]), ("smollm", ["1", "2", "3"]), ("llama-bpe", ["123"]), ("default", ["123"])],
)
def test_digits_are_split_as_the_pre_tokenizer_says(pre, expected, tmp_path):
    tokenizer = build(byte_level(pre, merges=["1 2", "12 3"]), tmp_path)
    assert pieces(tokenizer, "123", add_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("gpt-2", ["1", "234"]), ("llama-bpe", ["1", "2", "3", "4"]), ("default", ["1", "2", "3", "4"])],
)
def test_llama_3_takes_three_digits_at_a_time(pre, expected, tmp_path):
    tokenizer = build(byte_level(pre, merges=["3 4", "2 34"]), tmp_path)
    assert pieces(tokenizer, "1234", add_special_tokens=False) == expected


def test_llama_3_begins_texts_and_takes_whole_words(tmp_path):
    tokenizer = build(byte_level("llama-bpe", more=["Ġcat"]), tmp_path)
    assert pieces(tokenizer, "a cat") == ["<begin>", "a", "Ġcat"]
    assert pieces(tokenizer, "a cat", add_special_tokens=False) == ["a", "Ġcat"]


def test_what_is_added_around_a_text_is_the_files_choice(tmp_path):
    metadata = byte_level(ggml__add_bos_token=True, ggml__add_eos_token=True)
    assert pieces(build(metadata, tmp_path), "a") == ["<begin>", "a", "<end>"]
    assert pieces(build(byte_level(), tmp_path), "a") == ["a"]


def test_special_tokens_in_a_text_become_their_ids(tmp_path):
    tokenizer = build(byte_level(), tmp_path)
    assert pieces(tokenizer, "<begin>a<tool><end>") == ["<begin>", "a", "<tool>", "<end>"]
    assert tokenizer.decode(tokenizer.encode("<begin>a<tool><end>")) == "a<tool>"
    assert tokenizer.decode(np.array(tokenizer.encode("<begin>a<end>")), False) == "<begin>a<end>"


def test_every_text_comes_back(tmp_path):
    tokenizer = build(byte_level("smollm"), tmp_path)
    text = "  Zwölf Boxkämpfer\n\t日本語 🙂 don't 42 "
    assert tokenizer.decode(tokenizer.encode(text)) == text


SCORES = {"▁": -1.0, "a": -1.5, "b": -2.0, "c": -2.5, "ab": -3.0, "bc": -4.0, "▁a": -5.0, "▁ab": -6.0}


def sentence_piece(**settings):
    """A SentencePiece tokenizer with byte fallback."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SCORES]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(SCORES)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + list(SCORES.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {f"tokenizer.{name.replace('__', '.')}": value for name, value in settings.items()}


def best_pairs_merged(text):
    """SentencePiece's rule: again and again join the neighbours whose piece scores best, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(SCORES.get(left + right, -np.inf), -i) for i, (left, right) in enumerate(itertools.pairwise(parts))]
        best, place = max(joined, default=(-np.inf, 0))
        if best == -np.inf:
            return parts
        parts[-place : 2 - place] = ["".join(parts[-place : 2 - place])]


@pytest.mark.parametrize("text", ["a", "ab", "abc", "bcab", "ab abc", "cab  bab", " a", "abcabc ab a b c"])
def test_sentence_piece_merges_by_score(text, tmp_path):
    tokenizer = build(sentence_piece(), tmp_path)
    assert pieces(tokenizer, text) == ["<s>", *best_pairs_merged(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentence_piece_falls_back_on_bytes(tmp_path):
    tokenizer = build(sentence_piece(), tmp_path)
    assert pieces(tokenizer, "aé", add_special_tokens=False) == ["▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("aé🙂 b")) == "aé🙂 b"


def test_sentence_piece_without_the_space_in_front(tmp_path):
    tokenizer = build(sentence_piece(ggml__add_space_prefix=False, ggml__add_bos_token=False), tmp_path)
    assert pieces(tokenizer, "ab a") == ["ab", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    assert tokenizer_from_gguf({}, file=tmp_path / "model.gguf") is None


def test_other_kinds_of_tokenizers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model.gguf: `tokenizer.ggml.model` must be .*, got 't5'"):
        build({"tokenizer.ggml.model": "t5"}, tmp_path)
    with pytest.raises(ValueError, match=r"model.gguf: `tokenizer.ggml.pre` must be .*, got 'tekken'"):
        build(byte_level("tekken"), tmp_path)
    metadata = byte_level()
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(ValueError, match=r"`tokenizer.ggml.merges` is missing"):
        build(metadata, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.merges": ["a nowhere"]}, "its tokenizer is damaged: .*nowhere"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "`tokenizer.ggml.bos_token_id` must be below 259, got 9999"),
        ({"tokenizer.ggml.tokens": ["a", "a", "b"]}, "`tokenizer.ggml.tokens` must all differ, got 2 of 3"),
    ],
)
def test_damaged_tokenizers_are_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(byte_level() | change, tmp_path)


def write_settings(folder, tokenizer, **settings):
    save_tokenizer(tokenizer, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("build_metadata", [byte_level, sentence_piece])
def test_a_saved_tokenizer_is_read_back(build_metadata, tmp_path):
    tokenizer = build(build_metadata(chat_template="{{ messages }}\n"), tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    again = tokenizer_from_folder(tmp_path)
    assert again is not None
    assert again.encode("<s>ab <end>abc é") == tokenizer.encode("<s>ab <end>abc é")
    assert again.chat_template == "{{ messages }}\n"
    assert (again.bos_token, again.eos_token) == (tokenizer.bos_token, tokenizer.eos_token)


def test_templates_and_tokens_of_tokenizer_config_are_read(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer = build(byte_level(), tmp_path)
    write_settings(tmp_path, tokenizer, chat_template=named, bos_token={"content": "<begin>"}, eos_token="<end>")
    again = tokenizer_from_folder(tmp_path)
    assert again is not None
    assert (again.chat_template, again.bos_token, again.eos_token) == ("D", "<begin>", "<end>")
    (tmp_path / "chat_template.jinja").write_text("J")
    again = tokenizer_from_folder(tmp_path)
    assert again is not None
    assert again.chat_template == "J"


def test_templates_without_a_default_are_refused(tmp_path):
    write_settings(tmp_path, build(byte_level(), tmp_path), chat_template=[{"name": "rag", "template": "R"}])
    with pytest.raises(ValueError, match=r"no `chat_template` is named 'default', got \['rag'\]"):
        tokenizer_from_folder(tmp_path)


def test_a_damaged_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer that"):
        tokenizer_from_folder(tmp_path)


def render(template, messages=HELLO, **tokens):
    return render_chat(template, messages, add_generation_prompt=True, special_tokens=tokens)


def test_templates_are_rendered_as_hugging_face_does():
    template = (
        "{% for m in messages %}\n    {% if true %}\n{{ bos_token }}{{ m.content | tojson }}\n{% endif %}\n{% endfor %}"
    )
    assert render(template, [{"role": "user", "content": "<é>"}], bos_token="<s>") == '<s>"<é>"\n'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{% if add_generation_prompt %}go{% endif %}") == "go"
    assert render("{% if not eos_token is defined %}none{% endif %}") == "none"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "does not take these `messages`"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    ],
)
def test_what_a_template_refuses_is_a_value_error(template, message):
    with pytest.raises(ValueError, match=message):
        render(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"`messages` must be a list of one message or more, got \[\]"),
        ("Hello", r"`messages` must be a list .*'Hello'"),
        ({"role": "user"}, r"`messages` must be a list"),
        (["Hello"], r"`messages\[0\]` must be a dictionary, got 'Hello'"),
        ([*HELLO, {"role": "user"}], r"`messages\[1\]` must have a string under 'content'"),
        ([{"content": "Hello"}], r"`messages\[0\]` must have a string under 'role'"),
        ([{"role": "user", "content": None}], r"`messages\[0\]` must have a string under 'content'"),
    ],
)
def test_malformed_messages_are_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        render("{{ messages }}", messages)


def test_a_tokenizer_without_a_template_says_so(tmp_path):
    tokenizer = build(byte_level(), tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.apply_chat_template(HELLO)


def test_a_templates_own_beginning_is_not_doubled(tmp_path):
    tokenizer = build(byte_level("llama-bpe", chat_template="{{ bos_token }}a"), tmp_path)
    assert isinstance(tokenizer, Tokenizer)
    prompt = tokenizer.apply_chat_template(HELLO)
    assert pieces(tokenizer, prompt, add_special_tokens=False) == ["<begin>", "a"]
