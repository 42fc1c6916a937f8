"""Hugging Face's tokenizer files: tokenizer.json, tokenizer_config.json and chat_template.jinja."""

import json
import pathlib
from typing import Any

from kvjax.extras import extra
from kvjax.files import read_json
from kvjax_models.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


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
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The package raises nothing narrower.
        raise ValueError(f"{file} is not a tokenizer that `tokenizers` can read: {error}") from error
    settings = read_json(folder / CONFIG_FILE) if (folder / CONFIG_FILE).exists() else {}
    return Tokenizer(
        backend,
        chat_template=_chat_template(folder, settings),
        bos_token=_token_text(settings.get("bos_token")),
        eos_token=_token_text(settings.get("eos_token")),
    )


def save_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Writes the files that `tokenizer_from_folder` reads."""
    tokenizer.backend.save(str(folder / TOKENIZER_FILE))
    settings = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    (folder / CONFIG_FILE).write_text(json.dumps(settings, ensure_ascii=False, indent=2), encoding="utf-8")
    if tokenizer.chat_template is not None:
        # As bytes: a template's line ends must stay as they are.
        (folder / TEMPLATE_FILE).write_bytes(tokenizer.chat_template.encode())


def _chat_template(folder: pathlib.Path, settings: dict[str, Any]) -> str | None:
    if (folder / TEMPLATE_FILE).exists():
        return (folder / TEMPLATE_FILE).read_bytes().decode()
    template = settings.get("chat_template")
    if not isinstance(template, list):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named:
        raise ValueError(f"{folder / CONFIG_FILE}: no `chat_template` is named 'default', got {list(named)}.")
    return named["default"]


def _token_text(token: str | dict[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token
