"""What kvjax asks of a tokenizer, and how it is asked."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Tokenizer(Protocol):
    """What kvjax asks of a tokenizer; `kvjax_models.Tokenizer` and Hugging Face's are such."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        ...


def check_tokenizer(tokenizer: object) -> Tokenizer | None:
    """`tokenizer`, or a ValueError that says what it lacks."""
    if tokenizer is None or (isinstance(tokenizer, Tokenizer) and not isinstance(tokenizer, type)):
        return tokenizer
    hint = " (did you mean its `.tokenizer`?)" if hasattr(tokenizer, "tokenizer") else ""
    raise ValueError(
        f"`tokenizer` must be an object with `encode` and `decode`, such as `kvjax_models.load(...).tokenizer` or one "
        f"of Hugging Face's, got {tokenizer!r}{hint}."
    )


def encoded(text: str, tokenizer: Tokenizer | None, *, add_special_tokens: bool) -> np.ndarray:
    """The ids of a prompt's text.

    Raises:
        ValueError: there is no tokenizer, or the text is none that could be encoded.
    """
    if tokenizer is None:
        raise ValueError("a text prompt needs a `tokenizer`, such as `kvjax_models.load(...).tokenizer`.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"`prompt` must be text that UTF-8 can write, got the lone surrogate {text[error.start]!r} at character "
            f"{error.start}."
        ) from error
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if hasattr(ids, "ids"):
        raise ValueError(
            f"`tokenizer.encode` must give a list of ids, got {type(ids).__name__}; "
            "`kvjax_models.Tokenizer(tokenizer)` makes one of the package `tokenizers` such."
        )
    return np.asarray(ids, np.int64)


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """The text of one token, special ones included."""
    return tokenizer.decode([token], skip_special_tokens=False)


def is_special(token: int, tokenizer: Tokenizer) -> bool:
    """Whether a token is left out of texts."""
    return tokenizer.decode([token], skip_special_tokens=True) == "" != token_text(token, tokenizer)
