"""Hugging Face's tokenizer files: which settings act, and how damaged ones are told."""

import json
import os

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from kvjax_models import hub
from kvjax_models.tokenizer_files import save_tokenizer, tokenizer_from_folder

HELLO = [{"role": "user", "content": "Hello"}]
BEGIN, END, A, B, AB, SPACE = 1, 2, 3, 4, 5, 6


def write(folder, *, begins=0, change=lambda content: None, **settings):
    """A tokenizer of a few letters, whose texts begin with so many <s>, and its tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", "a", "b", "ab", "Ġ"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>")])
    if begins:
        backend.post_processor = TemplateProcessing(single=["<s>"] * begins + ["$A"], special_tokens=[("<s>", BEGIN)])
    content = json.loads(backend.to_str())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def read(folder):
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None
    return tokenizer


def test_batch_settings_of_a_tokenizer_file_never_act(tmp_path):
    def change(content):
        content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        padding = {"strategy": {"Fixed": 100}, "direction": "Left", "pad_to_multiple_of": 8}
        content["padding"] = {**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
        content["model"]["dropout"] = 0.9

    settings = {"model_max_length": 4, "bos_token": "<s>", "add_bos_token": True, "clean_up_tokenization_spaces": True}
    tokenizer = read(write(tmp_path, change=change, **settings, truncation=True, max_length=3, padding="max_length"))
    assert {tuple(tokenizer.encode("ab" * 20)) for _ in range(20)} == {(BEGIN, *[AB] * 20)}
    save_tokenizer(tokenizer, tmp_path)
    again = json.loads((tmp_path / "tokenizer.json").read_text())
    assert (again["truncation"], again["padding"], again["model"]["dropout"]) == (None, None, None)


@pytest.mark.parametrize(
    ("begins", "settings", "ids"),
    [
        (0, {}, [AB]),
        (1, {}, [BEGIN, AB]),
        (2, {}, [BEGIN, BEGIN, AB]),  # As the file says; transformers does the same.
        (0, {"add_bos_token": True}, [BEGIN, AB]),
        (1, {"add_bos_token": True}, [BEGIN, AB]),
        (2, {"add_bos_token": True}, [BEGIN, AB]),
        (1, {"add_bos_token": False}, [AB]),
        (0, {"add_bos_token": True, "add_eos_token": True}, [BEGIN, AB, END]),
        (0, {"add_eos_token": True}, [AB, END]),
        (1, {"add_bos_token": None, "add_eos_token": None}, [BEGIN, AB]),
    ],
)
def test_what_goes_around_a_text_is_what_the_settings_say(begins, settings, ids, tmp_path):
    tokenizer = read(write(tmp_path, begins=begins, bos_token="<s>", eos_token={"content": "</s>"}, **settings))
    assert tokenizer.encode("ab") == ids
    assert tokenizer.encode("ab", add_special_tokens=False) == [AB]


def test_special_tokens_of_their_own_file_are_known(tmp_path):
    folder = write(tmp_path, chat_template="{{ bos_token }}{{ pad_token }}{{ eos_token }}", eos_token="<old>")
    named = {"bos_token": {"content": "<s>", "lstrip": False}, "pad_token": "b", "eos_token": "</s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = read(folder)
    assert tokenizer.apply_chat_template(HELLO) == "<s>b</s>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    # A named token is special, whatever tokenizer.json says.
    assert tokenizer.encode("ab") == [A, B]
    assert tokenizer.decode([BEGIN, A, B]) == "a"
    save_tokenizer(tokenizer, tmp_path)
    assert read(tmp_path).apply_chat_template(HELLO) == "<s>b</s>"


def test_unnamed_special_tokens_are_left_out_of_decoded_texts(tmp_path):
    entry = {"content": "ab", "lstrip": False}
    assert read(write(tmp_path, additional_special_tokens=[entry, "a"])).decode([A, B, AB]) == "b"
    assert read(write(tmp_path, extra_special_tokens=[entry])).decode([A, B, AB]) == "a b"
    # Named ones are for templates too.
    tokenizer = read(write(tmp_path, extra_special_tokens={"tool_token": "ab"}, chat_template="{{ tool_token }}"))
    assert (tokenizer.decode([A, B, AB]), tokenizer.apply_chat_template(HELLO)) == ("a b", "ab")


def test_newer_settings_win_over_the_special_tokens_file(tmp_path):
    folder = write(tmp_path, added_tokens_decoder={"1": {"content": "<s>"}}, eos_token="</s>", pad_token=None)
    others = {"bos_token": "<s>", "eos_token": "<old>", "pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(others))
    assert read(folder).special_tokens == {"eos_token": "</s>", "bos_token": "<s>"}


def test_added_tokens_of_the_settings_are_found_in_texts(tmp_path):
    entry = {"content": "<tool>", "special": True, "normalized": False, "lstrip": False}
    folder = write(tmp_path, added_tokens_decoder={"7": entry})
    assert read(folder).encode("a<tool>b") == [A, 7, B]
    folder = write(tmp_path)
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 7}))
    assert read(folder).encode("a<tool>b") == [A, 7, B]
    write(tmp_path, added_tokens_decoder={"9": entry})
    with pytest.raises(ValueError, match=r"tokenizer_config.json: the added token '<tool>' must have .* 7, got 9"):
        read(tmp_path)


def test_templates_are_read_from_files_of_their_own(tmp_path):
    folder = write(tmp_path, chat_template="old")
    (folder / "chat_template.jinja").write_bytes("é\r\n{{ bos_token }}".encode())
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = read(folder)
    assert tokenizer.apply_chat_template(HELLO) == "é\n"
    assert tokenizer.apply_chat_template(HELLO, chat_template="rag") == "R"
    saved = tmp_path / "saved"
    saved.mkdir()
    save_tokenizer(tokenizer, saved)
    again = read(saved)
    assert (again.named_templates, again.apply_chat_template(HELLO)) == ({"rag": "R"}, "é\n")


def test_the_hub_loader_fetches_what_is_read(monkeypatch):
    fetched = {"special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "tokenizer_config.json"}
    assert {*fetched, "tokenizer.json", "additional_chat_templates/*.jinja"} <= set(hub._FILES)


def bomb(content):
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [double] * 60}


def crowd(content):
    special = {"<s>": {"id": "<s>", "ids": [1] * 1000, "tokens": ["<s>"] * 1000}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 1000 + [{"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (bomb, {}, r"tokenizer.json .*its normalizer may make a text \d+ times as long"),
        (crowd, {}, r"tokenizer.json .*adds 1000000 tokens around a text"),
        (lambda content: content.update(model=[]), {}, "tokenizer.json is not a tokenizer that"),
        (lambda content: content["model"].update(vocab="abc"), {}, "tokenizer.json is not a tokenizer that"),
        (None, {"bos_token": 3}, "tokenizer_config.json: `bos_token` must be a string, or an object .* got 3"),
        (None, {"bos_token": {"content": None}}, "tokenizer_config.json: `bos_token` must be a string"),
        (None, {"add_bos_token": "yes"}, "tokenizer_config.json: `add_bos_token` must be true or false, got 'yes'"),
        (None, {"add_bos_token": True, "bos_token": "<none>"}, "tokenizer_config.json .*'<none>'.* not in the vocab"),
        (None, {"chat_template": 3}, "tokenizer_config.json: `chat_template` must be a string, or a list of objects"),
        (None, {"chat_template": [{"name": "default"}]}, "tokenizer_config.json.* `template` is missing"),
        (None, {"added_tokens_decoder": {"x": {"content": "y"}}}, "tokenizer_config.json.*`x` must have a token id"),
        (None, {"added_tokens_decoder": {"7": 3}}, "tokenizer_config.json.*`7` must be an object, got 3"),
        (None, {"additional_special_tokens": [3]}, "`additional_special_tokens` must be a string, or an object"),
        (None, {"extra_special_tokens": 3}, "`extra_special_tokens` must be a list of tokens, got 3"),
        (None, {"added_tokens_decoder": []}, "`added_tokens_decoder` must be an object"),
    ],
)
def test_damaged_settings_are_named(change, settings, message, tmp_path):
    write(tmp_path, change=change or (lambda content: None), **settings)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_files_that_are_no_json_are_named(name, tmp_path):
    write(tmp_path)
    for content in (b'["*100000', b"[" * 100_000, b"\xff", b"3", b""):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            read(tmp_path)
    os.remove(tmp_path / name)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} .*no regular file"):
        read(tmp_path)


def test_a_damaged_template_is_named(tmp_path):
    write(tmp_path, chat_template="{{ 1 / 0 }}")
    with pytest.raises(
        ValueError, match=r"tokenizer_config.json: `chat_template` does not take these `messages`: Zero"
    ):
        read(tmp_path).apply_chat_template(HELLO)
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"chat_template.jinja is not UTF-8 text: byte 1"):
        read(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match=r"chat_template.jinja does not take these `messages`: TemplateSyntaxError"):
        read(tmp_path).apply_chat_template(HELLO)


def test_text_that_is_none_is_refused(tmp_path):
    tokenizer = read(write(tmp_path))
    with pytest.raises(ValueError, match=r"`text` must be text .* lone surrogate '\\ud800' at character 1"):
        tokenizer.encode("a\ud800b")
    with pytest.raises(ValueError, match="`ids` must be token ids, got -1"):
        tokenizer.decode([A, -1])
    with pytest.raises(ValueError, match="`ids` must be token ids, got 4294967296"):
        tokenizer.decode([1 << 32])
    assert tokenizer.decode([A, 99]) == "a"
