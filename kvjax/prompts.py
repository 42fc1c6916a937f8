"""Prompts in every form that callers have them, as padded token ids."""

import operator
import os
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from kvjax.allocation import bucket
from kvjax.conversation import chat_ids, continued_ids
from kvjax.policies.base import Policy
from kvjax.state import Known, ModelSpec
from kvjax.tokenizing import Tokenizer, encoded

#: Where the package's files are: warnings point past them.
PACKAGE = f"{pathlib.Path(__file__).parent}{os.sep}"


class LongContextWarning(UserWarning):
    """A prompt is longer than the model was trained for."""


class NonFiniteWarning(UserWarning):
    """A model's scores of the next token are NaN or infinite."""


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


class Behind(NamedTuple):
    """What the rows of a prompt go on from.

    Attributes:
        last_tokens: [B], the newest token of each row; -1 where it is not known.
        stops: tokens that end answers.
    """

    last_tokens: np.ndarray
    stops: tuple[int, ...] = ()

    @classmethod
    def cache(cls, known: Known | None, rows: int, stops: Sequence[int]) -> "Behind":
        """What a cache's rows end with."""
        return cls(np.full(rows, -1) if known is None else known.last_tokens, tuple(stops))


def token_rows(
    prompt: object,
    *,
    model: ModelSpec,
    tokenizer: Tokenizer | None = None,
    behind: Behind | None = None,
    argument: str = "prompt",
) -> list[np.ndarray]:
    """The token ids of every row of a prompt.

    Args:
        prompt: ids [n] or [B, n] (array or list), a list of rows of different lengths, a text or a list of texts, a
            chat (a list of {"role": ..., "content": ...}) or a list of chats, or what a Hugging Face tokenizer gives:
            `input_ids` and `attention_mask`, which says which ids are none.
        model: whose ids they must be.
        tokenizer: needed for texts and chats.
        behind: what the rows go on from: texts then get no token that begins a text, and chats are new messages.
        argument: the caller's name of the prompt, for messages.

    Raises:
        ValueError: no row, an empty row, an id that the model does not have, text without a tokenizer.
    """
    try:
        given = _split(prompt, argument)
        if behind is not None and len(given) != len(behind.last_tokens):
            raise ValueError(
                f"`{argument}` must have a row for each of the cache's {len(behind.last_tokens)}, got {len(given)}."
            )
        rows = [_ids(row, tokenizer, behind, index, argument) for index, row in enumerate(given)]
    except jax.errors.TracerArrayConversionError as error:
        raise ValueError(
            f"`{argument}` must be ids that are known, got traced ones: their number gives shapes. Call this function "
            "outside of `jax.jit`, `jax.vmap` and `jax.grad`; under them, a policy's `prefill` and `kvjax.decode` can "
            "be called."
        ) from error
    if not rows:
        raise ValueError(f"`{argument}` has no rows.")
    for index, row in enumerate(rows):
        if row.size == 0:
            where = "" if len(rows) == 1 else f" in row {index}"
            raise ValueError(f"`{argument}` must have at least one token, got none{where}.")
        wrong = row[(row < 0) | (row >= model.vocab_size)]
        if wrong.size:
            raise ValueError(
                f"`{argument}` ids must be from 0 to {model.vocab_size - 1}, got {int(wrong[0])} in row {index}."
            )
    return [row.astype(np.int32) for row in rows]


def _split(prompt: object, argument: str) -> list[object]:
    """The rows of a prompt, each in the form that the caller gave it."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, Mapping):
        return _masked(prompt, argument) if "input_ids" in prompt else [[prompt]]
    if hasattr(prompt, "__array__") and not isinstance(prompt, Sequence):
        array = _array(prompt, argument)
        if array.ndim not in (1, 2):
            raise ValueError(f"`{argument}` must be ids [n] or [B, n], got an array of shape {array.shape}.")
        return [array] if array.ndim == 1 else list(array)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise ValueError(f"`{argument}` must be token ids, text or a chat, got {type(prompt).__name__}.")
    if not prompt:
        raise ValueError(f"`{argument}` must have at least one token, got none.")
    first = prompt[0]
    if isinstance(first, str | Sequence) or getattr(first, "ndim", 0) > 0:
        return list(prompt)
    # One row of ids, or one chat.
    return [prompt]


def _masked(prompt: Mapping[str, object], argument: str) -> list[object]:
    """The rows of a Hugging Face tokenizer's `input_ids`, without the pads that its `attention_mask` tells."""
    rows = _split(prompt["input_ids"], f"{argument}['input_ids']")
    mask = prompt.get("attention_mask")
    if mask is None:
        return rows
    masks = [np.asarray(row) for row in _split(mask, f"{argument}['attention_mask']")]
    unpadded: list[object] = []
    for row, keep in zip([np.asarray(row) for row in rows], masks, strict=False):
        ones = np.flatnonzero(keep)
        if row.shape != keep.shape or (ones.size and ones[-1] - ones[0] + 1 != ones.size):
            raise ValueError(
                f"`{argument}['attention_mask']` must mark one stretch of each row of `input_ids`, got {keep.tolist()}."
            )
        unpadded.append(row[ones])
    if len(masks) != len(rows):
        raise ValueError(f"`{argument}['attention_mask']` must have {len(rows)} rows, got {len(masks)}.")
    return unpadded


def _ids(row: object, tokenizer: Tokenizer | None, behind: Behind | None, index: int, argument: str) -> np.ndarray:
    if isinstance(row, str):
        return encoded(row, tokenizer, add_special_tokens=behind is None)
    if isinstance(row, Sequence) and not isinstance(row, bytes) and row and isinstance(row[0], Mapping):
        if behind is None:
            return chat_ids(row, tokenizer)
        return continued_ids(row, tokenizer, last_token=int(behind.last_tokens[index]), stops=behind.stops)
    if isinstance(row, list | tuple) and bool in set(map(type, row)):
        raise ValueError(f"`{argument}` ids must be integers, got bool.")
    array = _array(row, argument)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"`{argument}` ids must be integers, got {array.dtype}.")
    if array.ndim != 1:
        raise ValueError(f"`{argument}` rows must be ids [n], got shape {array.shape}.")
    return array


def _array(row: object, argument: str) -> np.ndarray:
    """Ids as NumPy has them, from lists and whatever array can be one on this host."""
    try:
        return np.asarray(row)
    except jax.errors.TracerArrayConversionError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"`{argument}` rows must be ids [n], got {type(row).__name__}: {error}") from error


def check_policy(policy: object) -> Policy:
    """`policy`, or a ValueError that says what it should be."""
    if isinstance(policy, type) and issubclass(policy, Policy):
        name = policy.__name__
        raise ValueError(f"`policy` must be a policy such as `{name}(...)`, with its settings; got the class {name}.")
    if not isinstance(policy, Policy):
        raise ValueError(f"`policy` must be a policy such as `kvjax.SnapKV(budget=1024)`, got {policy!r}.")
    try:
        hash(policy)
    except TypeError as error:
        raise ValueError(
            f"`policy` must be hashable, since programs are compiled for it, got {policy!r} ({error}): a policy is a "
            "`dataclasses.dataclass(frozen=True)` whose settings are hashable."
        ) from error
    return policy


def check_new_tokens(max_new_tokens: object) -> int:
    """`max_new_tokens` as an int of at least 1."""
    try:
        count = operator.index(max_new_tokens)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise ValueError(f"`max_new_tokens` must be an integer, got {max_new_tokens!r}.") from None
    if count < 1 or isinstance(max_new_tokens, bool):
        raise ValueError(f"`max_new_tokens` must be at least 1, got {max_new_tokens}.")
    if count >= 2**30:
        raise ValueError(f"`max_new_tokens` must be below 2**30 = {2**30}, got {max_new_tokens}.")
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
            # The first line that is not kvjax's own.
            skip_file_prefixes=(PACKAGE,),
        )
