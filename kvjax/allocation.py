"""How many tokens each layer and head may keep."""

import operator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


def check_budget(budget: object, *, at_least: int = 1, what: str = "1") -> int | float:
    """The budget as an int (tokens) or a float (fraction of the prompt).

    Args:
        budget: what the caller gave.
        at_least: the fewest tokens that the policy can do with.
        what: where that number comes from, for the message.

    Raises:
        ValueError: not an int of at least `at_least`, nor a float in (0, 1).
    """
    if not isinstance(budget, bool):
        try:
            tokens = operator.index(budget)  # pyright: ignore[reportArgumentType]
        except TypeError:
            pass
        else:
            if tokens < 1:
                raise ValueError(f"`budget` must be at least 1 token, got {tokens}.")
            if tokens < at_least:
                raise ValueError(f"`budget` must be at least {what} = {at_least} tokens, got {tokens}.")
            return tokens
        if isinstance(budget, float | np.floating) and 0.0 < budget < 1.0:
            return float(budget)
    raise ValueError(
        f"`budget` must be a number of tokens (int) or a fraction of the prompt (float between 0 and 1), "
        f"got {budget!r}."
    )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        allowed = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")


def check_rows(budget: int | float, lengths: np.ndarray, *, at_least: int, what: str) -> None:
    """Raises a ValueError if a fraction of some row's length is too few tokens for the policy."""
    if isinstance(budget, int):
        return
    for row, length in enumerate(np.atleast_1d(lengths)):
        kept = budget_tokens(budget, int(length))
        if kept < at_least:
            raise ValueError(
                f"`budget` = {budget} of the {length} tokens of row {row} is {kept} tokens, "
                f"under {what} = {at_least}; give a larger fraction, or a number of tokens."
            )


def from_compression_ratio(compression_ratio: float) -> float:
    """The fraction that is kept where kvpress speaks of the fraction that is removed."""
    if not 0.0 < compression_ratio < 1.0:
        raise ValueError(f"`compression_ratio` must be between 0 and 1, got {compression_ratio!r}.")
    return 1.0 - compression_ratio


def budget_tokens(budget: int | float, length: int) -> int:
    """Tokens that a head may keep of `length` seen: the int, or the fraction, floored; never over `length`."""
    return min(budget, length) if isinstance(budget, int) else int(length * budget)


def budget_lengths(budget: int | float, lengths: Int[Array, "*shape"], *, max_length: int) -> Int[Array, "*shape"]:
    """`budget_tokens` of traced lengths up to `max_length`."""
    if isinstance(budget, int):
        return jnp.minimum(lengths, budget)
    # A table, because float32 arithmetic would round some fractions to the other side of an integer.
    table = np.asarray([int(length * budget) for length in range(max_length + 1)], np.int32)
    return jnp.asarray(table)[jnp.clip(lengths, 0, max_length)]


def bucket(length: int) -> int:
    """The padded length of a prompt: one of four sizes an octave, so that few shapes are compiled."""
    if length <= 64:
        return -(-max(length, 1) // 16) * 16
    step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step
