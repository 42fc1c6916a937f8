"""Hugging Face's tokenizer files: tokenizer.json, what stands beside it, and chat templates.

They are read as transformers 5.24 does, but for two things that it passes over and that checkpoints say in plain
words: `add_bos_token` and `add_eos_token` beside a tokenizer.json (Llama's class of transformers 4 follows them), and
special tokens that only special_tokens_map.json names.
"""

import pathlib
from collections.abc import Set
from typing import Any, NamedTuple

from kvjax.extras import extra
from kvjax.fields import Fields
from kvjax.files import read_bytes, read_json, read_text, reading, write_json, write_text
from kvjax_models.tokenizer import Tokenizer
from kvjax_models.tokenizer_repair import check_growth, drop_batch_settings, set_around

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"

_TEMPLATE_LIMIT = 4 * 1024 * 1024  # bytes; the longest published one has 50,000
_LARGEST_ID = (1 << 32) - 1
# Passed to templates by every tokenizer that has them; any other field that ends in "_token" joins them.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _Templates(NamedTuple):
    """The chat templates of a checkpoint.

    Attributes:
        default: the Jinja source, or None.
        named: those for other uses.
        source: their file, for messages.
    """

    default: str | None
    named: dict[str, str]
    source: str


def tokenizer_from_folder(folder: pathlib.Path) -> Tokenizer | None:
    """Reads the tokenizer of a checkpoint; None where there is no tokenizer.json.

    Raises:
        ValueError: a file is damaged, or there are several chat templates and none is the default.
    """
    file = folder / TOKENIZER_FILE
    if not file.exists():
        return None
    with extra("text", purpose="A tokenizer (or `load(..., tokenizer=False)`)"):
        import tokenizers
    content = read_bytes(file)
    with reading(file, what="a tokenizer that `tokenizers` can read"):
        backend = tokenizers.Tokenizer.from_buffer(content)
        check_growth(backend)
        drop_batch_settings(backend)
    settings = _fields(folder / CONFIG_FILE)
    others = _fields(folder / MAP_FILE)
    special = _special_tokens(settings, others)
    texts = {*special.values(), *_unnamed_special_tokens(settings), *_unnamed_special_tokens(others)}
    _add_tokens(backend, settings, _fields(folder / ADDED_FILE), texts)
    add_bos, add_eos = settings.flag("add_bos_token", None), settings.flag("add_eos_token", None)
    if add_bos is not None or add_eos is not None:
        bos, eos = special.get("bos_token"), special.get("eos_token")
        with reading(folder / CONFIG_FILE, what="a tokenizer's configuration"):
            set_around(backend, before=bos if add_bos else None, after=eos if add_eos else None)
    templates = _templates(folder, settings)
    return Tokenizer(
        backend,
        chat_template=templates.default,
        named_templates=templates.named,
        special_tokens=special,
        source=str(file),
        template_source=templates.source,
    )


def save_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Writes the files that `tokenizer_from_folder` reads."""
    write_text(folder / TOKENIZER_FILE, tokenizer.backend.to_str(pretty=True))
    settings: dict[str, Any] = dict(tokenizer.special_tokens)
    if tokenizer.named_templates:
        # A list, not files of their own: a template's name need not be a file's.
        templates = tokenizer.named_templates
        if tokenizer.chat_template is not None:
            templates = {**templates, "default": tokenizer.chat_template}
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    elif tokenizer.chat_template is not None:
        write_text(folder / TEMPLATE_FILE, tokenizer.chat_template)
    write_json(folder / CONFIG_FILE, settings)


def _fields(file: pathlib.Path) -> Fields:
    return Fields(read_json(file) if file.exists() else {}, source=file)


def _special_tokens(settings: Fields, others: Fields) -> dict[str, str]:
    """The named special tokens of tokenizer_config.json and special_tokens_map.json, by name.

    The second file's win where the first is from before transformers 4.34, which wrote `added_tokens_decoder` in it.
    """
    older = "added_tokens_decoder" not in settings
    special: dict[str, str] = {}
    for fields, wins in ((settings, True), (others, older)):
        names = [*_NAMED, *(name for name in fields.values if name.endswith("_token") and name not in _NAMED)]
        for name in names:
            # Null says that there is none; any other field may be a flag, such as `add_bos_token`.
            if name not in fields or (not wins and name in settings.values):
                continue
            if name in _NAMED or isinstance(fields.take(name), str | dict):
                special[name] = _token_text(fields, name)
    extra_tokens = settings.take("extra_special_tokens", None)
    if isinstance(extra_tokens, dict):
        named = Fields(extra_tokens, source=f"{settings.source}: `extra_special_tokens`")
        special |= {name: _token_text(named, name) for name in named.values if name in named}
    return special


def _unnamed_special_tokens(fields: Fields) -> list[str]:
    """Special tokens that templates do not get."""
    texts = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = fields.take(name, [])
        if isinstance(value, list):
            texts += [_token_text(Fields({name: entry}, source=fields.source), name) for entry in value]
        elif name == "additional_special_tokens" or not isinstance(value, dict):
            fields.fail(name, "must be a list of tokens")
    return texts


def _token_text(fields: Fields, name: str) -> str:
    value = fields.take(name)
    if isinstance(value, str):
        return value
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        fields.fail(name, "must be a string, or an object with a string as `content`")
    return content


def _add_tokens(backend: Any, settings: Fields, older: Fields, special: Set[str]) -> None:
    """Has the files' added tokens be found in texts before anything else, and special ones be known as such."""
    from tokenizers import AddedToken

    wanted = _added_by_id(settings, older, special)
    for number, token in sorted(wanted.items()):
        with reading(str(settings.source), what="a tokenizer's configuration"):
            if backend.token_to_id(token.content) is None:
                backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != number:
            raise ValueError(
                f"{settings.source}: the added token {token.content!r} must have the id that {TOKENIZER_FILE} "
                f"gives it, {found}, got {number}."
            )
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in sorted(special):
        # A token that neither file has an id for is one that the model cannot have learned.
        if not text or backend.token_to_id(text) is None:
            continue
        token = known.get(text, AddedToken(text, normalized=False))
        if not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _added_by_id(settings: Fields, older: Fields, special: Set[str]) -> dict[int, Any]:
    """The tokens of `added_tokens_decoder`, or of added_tokens.json where that is missing."""
    from tokenizers import AddedToken

    if "added_tokens_decoder" not in settings:
        ids = {text: older.integer(text, at_most=_LARGEST_ID) for text in older.values if text in older}
        return {
            number: AddedToken(text, special=text in special, normalized=text not in special)
            for text, number in ids.items()
        }
    entries = settings.nested("added_tokens_decoder")
    tokens = {}
    for key in entries.values:
        entry = entries.nested(key)
        if not (key.isascii() and key.isdigit() and int(key) <= _LARGEST_ID):
            entries.fail(key, f"must have a token id up to {_LARGEST_ID} as its name")
        flags = {name: entry.flag(name, False) for name in ("lstrip", "rstrip", "single_word", "special")}
        flags["normalized"] = entry.flag("normalized", not flags["special"])
        tokens[int(key)] = AddedToken(entry.text("content"), **flags)
    return tokens


def _templates(folder: pathlib.Path, settings: Fields) -> _Templates:
    """The chat templates: files of their own win over those of tokenizer_config.json."""
    files = {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    source = folder / (TEMPLATE_FOLDER if files else TEMPLATE_FILE)
    if (folder / TEMPLATE_FILE).exists():
        files["default"] = source = folder / TEMPLATE_FILE
    if files:
        named = {name: read_text(file, limit=_TEMPLATE_LIMIT) for name, file in files.items()}
    else:
        source = f"{settings.source}: `chat_template`"
        named = _configured_templates(settings)
    if named and "default" not in named:
        raise ValueError(f"{source}: no `chat_template` is named 'default', got {list(named)}.")
    return _Templates(named.pop("default", None), named, str(source))


def _configured_templates(settings: Fields) -> dict[str, str]:
    value = settings.take("chat_template", None)
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        settings.fail("chat_template", "must be a string, or a list of objects with `name` and `template`")
    entries = [Fields(entry, source=f"{settings.source}: `chat_template`") for entry in value]
    return {entry.text("name"): entry.text("template") for entry in entries}
