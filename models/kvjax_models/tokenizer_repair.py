"""Repairs a `tokenizers.Tokenizer`: batch settings, what it adds around a text, and how much longer it makes one."""

import json
from typing import Any

#: Most tokens around a text; published tokenizers add two.
_AROUND_LIMIT = 64
#: How many times longer replacements may make a text; SentencePiece's visible spaces make it three times as many bytes.
_GROWTH_LIMIT = 64


def drop_batch_settings(backend: Any) -> None:
    """Has every text become all of its tokens, the same each time."""
    backend.no_truncation()
    backend.no_padding()
    # Dropout of merges is for training; transformers' Llama class drops it too.
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None


def set_around(backend: Any, *, before: str | None, after: str | None) -> None:
    """Has `add_special_tokens` put these tokens before and after a text, where it does not so already.

    Raises:
        ValueError: one of them is no token.
    """
    from tokenizers.processors import TemplateProcessing

    wanted = [token for token in (before, after) if token is not None]
    ids = [backend.token_to_id(token) for token in wanted]
    if None in ids:
        raise ValueError(f"the token {wanted[ids.index(None)]!r}, which goes around texts, is not in the vocabulary.")
    if backend.encode("", add_special_tokens=True).ids == ids:
        return
    single = [*([before] if before else []), "$A", *([after] if after else [])]
    backend.post_processor = TemplateProcessing(
        single=single, special_tokens=list(dict(zip(wanted, ids, strict=True)).items())
    )


def check_growth(backend: Any) -> None:
    """Raises a ValueError where a tokenizer adds or replaces so much that a short text fills the memory."""
    around = backend.num_special_tokens_to_add(False)
    if around > _AROUND_LIMIT:
        raise ValueError(f"it adds {around} tokens around a text, over the limit of {_AROUND_LIMIT}.")
    for name in ("normalizer", "decoder"):
        part = getattr(backend, name)
        growth = 1 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > _GROWTH_LIMIT:
            raise ValueError(f"its {name} may make a text {growth} times as long, over the limit of {_GROWTH_LIMIT}.")


def _growth(part: Any) -> int:
    """A bound on how many times as many characters a normalizer or decoder makes of a text."""
    if isinstance(part, list):
        growth = 1
        for each in part:
            growth *= _growth(each)
        return growth
    if not isinstance(part, dict):
        return 1
    if part.get("type") == "Replace":
        pattern = part["pattern"].get("String", "")
        return -(-len(part["content"]) // max(len(pattern), 1)) or 1
    if part.get("type") == "Prepend":
        return 1 + len(part["prepend"]) // 16
    return _growth([value for value in part.values() if isinstance(value, list)])
