"""Prompts in every form that callers have them, as padded token ids."""

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from kvjax.allocation import bucket
from kvjax.policies.base import Policy
from kvjax.state import ModelSpec


class LongContextWarning(UserWarning):
    """A prompt is longer than the model was trained for."""


@runtime_checkable
class Tokenizer(Protocol):
    """What kvjax asks of a tokenizer; `kvjax_models.Tokenizer` and Hugging Face's are such."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        ...


class Batch(NamedTuple):
    """Prompts side by side.

    Attributes:
        tokens: [B, T] int32, T a bucket's length; 0 right of a row's end.
        lengths: [B] int32.
    """

    tokens: np.ndarray
    lengths: np.ndarray

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.lengths.max())


def batch_of(rows: Sequence[np.ndarray]) -> Batch:
    """Rows of unequal lengths, padded on the right to a bucket."""
    lengths = np.asarray([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), bucket(int(lengths.max()))), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return Batch(tokens, lengths)


def token_rows(prompt: object, *, model: ModelSpec, tokenizer: Tokenizer | None = None) -> list[np.ndarray]:
    """The token ids of every row of a prompt.

    Args:
        prompt: ids [n] or [B, n] (array or list), a list of rows of different lengths, a text or a list of texts, a
            chat (a list of {"role": ..., "content": ...}) or a list of chats.
        model: whose ids they must be.
        tokenizer: needed for texts and chats.

    Raises:
        ValueError: no row, an empty row, an id that the model does not have, text without a tokenizer.
    """
    rows = [_ids(row, tokenizer) for row in _split(prompt)]
    if not rows:
        raise ValueError("`prompt` has no rows.")
    for index, row in enumerate(rows):
        if row.size == 0:
            where = "" if len(rows) == 1 else f" in row {index}"
            raise ValueError(f"`prompt` must have at least one token, got none{where}.")
        wrong = row[(row < 0) | (row >= model.vocab_size)]
        if wrong.size:
            raise ValueError(
                f"`prompt` ids must be from 0 to {model.vocab_size - 1}, got {int(wrong[0])} in row {index}."
            )
    return [row.astype(np.int32) for row in rows]


def _split(prompt: object) -> list[object]:
    """The rows of a prompt, each in the form that the caller gave it."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, Mapping):
        return [[prompt]]
    if isinstance(prompt, np.ndarray | jax.Array):
        array = np.asarray(prompt)
        if array.ndim not in (1, 2):
            raise ValueError(f"`prompt` must be ids [n] or [B, n], got an array of shape {array.shape}.")
        return [array] if array.ndim == 1 else list(array)
    if not isinstance(prompt, Sequence):
        raise ValueError(f"`prompt` must be token ids, text or a chat, got {type(prompt).__name__}.")
    if not prompt:
        raise ValueError("`prompt` must have at least one token, got none.")
    first = prompt[0]
    if isinstance(first, str | Sequence) or getattr(first, "ndim", 0) > 0:
        return list(prompt)
    # One row of ids, or one chat.
    return [prompt]


def _ids(row: object, tokenizer: Tokenizer | None) -> np.ndarray:
    if isinstance(row, str):
        return _encode(row, tokenizer, add_special_tokens=True)
    if isinstance(row, Sequence) and row and isinstance(row[0], Mapping):
        # The template writes the special tokens itself.
        return _encode(chat_text(row, tokenizer), tokenizer, add_special_tokens=False)
    array = np.asarray(row)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"`prompt` ids must be integers, got {array.dtype}.")
    if array.ndim != 1:
        raise ValueError(f"`prompt` rows must be ids [n], got shape {array.shape}.")
    return array


def chat_text(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer | None) -> str:
    """The text of a chat, up to where an answer begins, by the tokenizer's chat template.

    Raises:
        ValueError: `tokenizer` is None or has no chat template.
    """
    render = getattr(tokenizer, "apply_chat_template", None)
    if tokenizer is None or render is None:
        raise ValueError("a chat needs a `tokenizer` with a chat template, got none.")
    # Hugging Face's tokenizers give ids unless told otherwise.
    as_text = {"tokenize": False} if hasattr(tokenizer, "convert_ids_to_tokens") else {}
    return render(list(messages), add_generation_prompt=True, **as_text)


def _encode(text: str, tokenizer: Tokenizer | None, *, add_special_tokens: bool) -> np.ndarray:
    if tokenizer is None:
        raise ValueError("a text prompt needs a `tokenizer`, such as `kvjax_models.load(...).tokenizer`.")
    return np.asarray(tokenizer.encode(text, add_special_tokens=add_special_tokens), np.int64)


def check_policy(policy: object) -> Policy:
    """`policy`, or a ValueError that says what it should be."""
    if isinstance(policy, Policy):
        return policy
    raise ValueError(f"`policy` must be a policy such as `kvjax.SnapKV(budget=1024)`, got {policy!r}.")


def check_new_tokens(max_new_tokens: object) -> int:
    """`max_new_tokens` as an int of at least 1."""
    try:
        count = operator.index(max_new_tokens)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"`max_new_tokens` must be an integer, got {max_new_tokens!r}.") from None
    if count < 1 or isinstance(max_new_tokens, bool):
        raise ValueError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}.")
    return count


def warn_if_long(policy: Policy, model: ModelSpec, prompt_length: int, max_new_tokens: int) -> None:
    """Warns where positions will go past what the model was trained for."""
    total = prompt_length + max_new_tokens
    if total > model.max_positions and not policy.is_bounded(prompt_length, model.max_positions):
        warnings.warn(
            f"{prompt_length} tokens of prompt and up to {max_new_tokens} new ones are more than the "
            f"{model.max_positions} that the model was trained for; answers may be nonsense. "
            f'`StreamingLLM(budget=..., prefill_mask="streaming")` keeps positions within its cache.',
            LongContextWarning,
            # Past this function, the checked step and the public one, to the caller.
            stacklevel=4,
        )
