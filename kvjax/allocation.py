"""How many tokens each layer and head may keep."""

import dataclasses
import functools
import math
import operator
from typing import Literal, Protocol, runtime_checkable

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


def check_count(name: str, value: object, *, at_least: int, unit: str = "token") -> None:
    """Raises a ValueError unless `value` is an integer of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"`{name}` must be an integer, got {value!r}.")
    if value < at_least:
        limit = "must not be negative" if at_least == 0 else f"must be at least {at_least} {unit}"
        raise ValueError(f"`{name}` {limit}, got {value}.")


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
    """Tokens that a head may keep of `length` seen: the int, or the fraction, floored; never over `length`.

    The product is a binary one, as kvpress computes it: 0.29 of 100 tokens is 28.999..., and so 28.
    """
    return min(budget, length) if isinstance(budget, int) else int(length * budget)


def budget_lengths(budget: int | float, lengths: Int[Array, "*shape"], *, max_length: int) -> Int[Array, "*shape"]:
    """`budget_tokens` of traced lengths up to `max_length`."""
    if isinstance(budget, int):
        return jnp.minimum(lengths, budget)
    # A table, because float32 arithmetic would round some fractions to the other side of an integer.
    table = np.asarray([int(length * budget) for length in range(max_length + 1)], np.int32)
    return jnp.asarray(table)[jnp.clip(lengths, 0, max_length)]


@runtime_checkable
class Allocation(Protocol):
    """How a budget is spread over layers: hashable, and a pure function of numbers known before tracing."""

    @property
    def shared(self) -> bool:
        """Whether the heads of a layer share its budget, split by what their tokens are worth."""
        ...

    def counts(self, budget: int | float, lengths: np.ndarray, *, layers: int, fewest: int) -> np.ndarray:
        """Tokens that each KV head keeps (the heads' mean where they share), [layers, len(lengths)].

        Args:
            budget: tokens, or a fraction of each length.
            lengths: of prompts.
            layers: of the model.
            fewest: tokens that every head must have, if the prompt has as many.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """The same budget in every layer."""

    shared = False

    def counts(self, budget: int | float, lengths: np.ndarray, *, layers: int, fewest: int) -> np.ndarray:
        """See `Allocation.counts`."""
        del fewest
        return np.broadcast_to(_budgets(budget, lengths), (layers, len(lengths)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pyramid:
    """More for the lower layers: budgets fall from the first layer to the last.

    Cai et al., "PyramidKV" (arXiv 2406.02069). Of the part of the budget outside the tokens that are kept anyway
    (window and sinks), the last layer gets 1 / `beta` and the first one twice the mean less that. The total over
    all layers is exact to the token, by largest remainders; where a prompt is shorter than a layer's share, the
    other layers get what it cannot use.

    Attributes:
        beta: steepness; 1 is uniform.
        schedule: "linear" (the paper), or "geometric": the same ends' ratio in equal factors.
        variant: "exact", or "authors" and "kvpress": their own arithmetic, which overshoots, or becomes uniform.
    """

    beta: float = 20
    schedule: Literal["linear", "geometric"] = "linear"
    variant: Literal["exact", "authors", "kvpress"] = "exact"

    shared = False

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, ("linear", "geometric"))
        check_choice("variant", self.variant, ("exact", "authors", "kvpress"))
        if not self.beta >= 1:
            raise ValueError(f"`beta` must be at least 1, got {self.beta}.")

    def counts(self, budget: int | float, lengths: np.ndarray, *, layers: int, fewest: int) -> np.ndarray:
        """See `Allocation.counts`."""
        if layers == 1:
            return _budgets(budget, lengths)[None]
        if self.variant == "exact":
            return self._exact(budget, lengths, layers, fewest)
        counts = self._authors if self.variant == "authors" else self._kvpress
        return counts(budget, lengths, layers, fewest)

    def _exact(self, budget: int | float, lengths: np.ndarray, layers: int, fewest: int) -> np.ndarray:
        mean = _budgets(budget, lengths)
        spread = np.maximum(mean - fewest, 0)[None]
        depth = np.arange(layers)[:, None] / (layers - 1)
        least, most = spread / self.beta, 2 * spread - spread / self.beta
        if self.schedule == "linear":
            shares = most - depth * (most - least)
        else:
            falling = (1 / (2 * self.beta - 1)) ** depth
            shares = layers * spread * falling / falling.sum()
        return _clamped(fewest + shares, np.minimum(fewest, lengths), lengths, layers * mean)

    def _authors(self, budget: int | float, lengths: np.ndarray, layers: int, window: int) -> np.ndarray:
        capacity = np.full_like(lengths, budget) if isinstance(budget, int) else _budgets(budget, lengths)
        spread = capacity - window
        least = spread // int(self.beta)
        most = np.minimum(2 * spread - least, lengths - window)
        least = np.where(most == lengths - window, 2 * spread - most, least)
        step = (most - least) // (layers - 1)
        falling = np.minimum(most - np.arange(layers)[:, None] * step + window, lengths)
        falling = np.where(lengths < 2 * spread, np.minimum(capacity, lengths), falling)
        return np.where(lengths <= capacity, lengths, falling)

    def _kvpress(self, budget: int | float, lengths: np.ndarray, layers: int, window: int) -> np.ndarray:
        kept = budget * lengths if isinstance(budget, float) else np.minimum(budget, lengths).astype(float)
        capacity = window + kept
        least = (capacity - window) / self.beta
        most = (capacity - window) * 2 - least
        cut = most >= lengths - window
        most = np.where(cut, lengths - window, most)
        least = np.where(cut, (capacity - window) * 2 - most, least)
        step = (most - least) / (layers - 1)
        falling = np.rint(most - np.arange(layers)[:, None] * step)
        uniform = np.minimum(np.maximum(1, np.rint(kept)), lengths)
        fits = (lengths >= most) & (most >= least) & (least >= window)
        return np.where(fits, falling, uniform).astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Heads of a layer share its budget: one choice over all their tokens.

    Feng et al., "Ada-KV" (arXiv 2407.11550). Heads get different lengths, and really have them: their segments lie
    one behind another, and what a head does not use another does.

    Attributes:
        safeguard: share of the mean budget that every head has for sure.
        layers: how the budget is spread over layers.
    """

    safeguard: float = 0.2
    layers: "Uniform | Pyramid" = Uniform()

    shared = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.safeguard <= 1.0:
            raise ValueError(f"`safeguard` must be from 0 to 1, got {self.safeguard}.")

    def counts(self, budget: int | float, lengths: np.ndarray, *, layers: int, fewest: int) -> np.ndarray:
        """See `Allocation.counts`."""
        return self.layers.counts(budget, lengths, layers=layers, fewest=fewest)


#: A prompt so long that its length cuts no layer's share.
_ENDLESS = 1 << 40


def endless_counts(allocation: Allocation, budget: int, *, layers: int, fewest: int) -> np.ndarray:
    """Tokens that each layer keeps of a stream without end, [layers]."""
    return allocation.counts(budget, np.asarray([_ENDLESS]), layers=layers, fewest=fewest)[:, 0]


def endless_length(allocation: Allocation, budget: int, *, layers: int, fewest: int) -> int:
    """A length from which on all prompts keep what one without end does."""
    largest = int(endless_counts(allocation, budget, layers=layers, fewest=fewest).max())
    # No share may be cut by the length; the authors' and kvpress's arithmetic looks at twice the budget and a window.
    return max(largest, 2 * budget + fewest) + 1


def largest_counts(
    allocation: Allocation, budget: int | float, lengths: range, *, layers: int, fewest: int
) -> np.ndarray:
    """The most tokens that each layer keeps of a prompt of any of `lengths`, [layers].

    Args:
        allocation: how the budget is spread.
        budget: tokens, or a fraction.
        lengths: of prompts, ascending.
        layers: of the model.
        fewest: see `Allocation.counts`.
    """
    first, last = lengths[0], lengths[-1]
    if isinstance(budget, int):
        # From here on no share is cut by the length; the variants look at twice the budget and a window.
        largest = int(endless_counts(allocation, budget, layers=layers, fewest=fewest).max())
        enough = max(largest, 2 * budget + fewest) + 1
        first, last = min(first, enough), min(last, enough)
    else:
        cut = allocation.counts(budget, np.asarray([last]), layers=layers, fewest=fewest).max() >= last
        # Where the length cuts the largest shares, the others fall while the mean, a whole number, stands still.
        first = max(first, last - _lengths_for_a_token(allocation, budget) * (layers if cut else 1))
    return allocation.counts(budget, np.arange(first, last + 1), layers=layers, fewest=fewest).max(axis=1)


def _lengths_for_a_token(allocation: Allocation, budget: float) -> int:
    """Lengths over which every layer's share of a fraction grows by a token, so that rounding cannot hide it."""
    layers = allocation.layers if isinstance(allocation, Adaptive) else allocation
    if isinstance(layers, Uniform):
        slowest = budget
    elif isinstance(layers, Pyramid) and layers.variant == "exact":
        slowest = budget / (layers.beta if layers.schedule == "linear" else 2 * layers.beta - 1)
    else:
        # The variants' arithmetic turns uniform at some lengths, and others' is unknown.
        return _ENDLESS
    # The mean itself is floored: it may stand still over 1 / budget lengths at either end.
    return math.ceil(min(1 / slowest + 2 / budget, _ENDLESS))


@functools.lru_cache(maxsize=64)
def count_table(
    allocation: Allocation, budget: int | float, *, layers: int, fewest: int, max_length: int
) -> np.ndarray:
    """`Allocation.counts` for every length from 0 on, [layers, lengths]; the last column holds for all longer ones.

    Args:
        allocation: how the budget is spread.
        budget: tokens, or a fraction.
        layers: of the model.
        fewest: see `Allocation.counts`.
        max_length: the longest prompt that will be looked up.
    """
    longest = max_length
    if isinstance(budget, int):
        longest = min(max_length, endless_length(allocation, budget, layers=layers, fewest=fewest))
    table = allocation.counts(budget, np.arange(longest + 1), layers=layers, fewest=fewest)
    table = np.ascontiguousarray(table, np.int32)
    table.flags.writeable = False
    return table


def _budgets(budget: int | float, lengths: np.ndarray) -> np.ndarray:
    if isinstance(budget, int):
        return np.minimum(budget, lengths)
    return (lengths * budget).astype(np.int64)


def _clamped(shares: np.ndarray, least: np.ndarray, most: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Whole numbers near `shares` [layers, n], each from `least` to `most` [n], each column adding up to `totals`."""
    low, high = (np.broadcast_to(x, shares.shape).astype(float) for x in (least, most))
    totals = np.clip(totals, low.sum(0), high.sum(0))
    shares = np.clip(shares, low, high)
    # What a clamp took or gave goes to the layers that are free to take it, in equal parts.
    for _ in range(2 * len(shares)):
        missing = totals - shares.sum(0)
        free = np.where(missing[None] > 0, shares < high, shares > low)
        if (np.abs(missing) < 1e-6).all():
            break
        shares = np.clip(shares + np.where(free, missing / np.maximum(free.sum(0), 1), 0.0), low, high)
    whole = np.floor(shares + 1e-9)
    missing = np.round(totals - whole.sum(0)).astype(np.int64)
    remainders = np.where(whole < high, shares - whole, -1.0)
    order = np.argsort(-remainders, axis=0, kind="stable")
    ranks = np.argsort(order, axis=0, kind="stable")
    return (whole + (ranks < missing[None])).astype(np.int64)


def bucket(length: int) -> int:
    """The padded length of a prompt: one of four sizes an octave, so that few shapes are compiled."""
    step = _bucket_step(length)
    return -(-length // step) * step


def bucket_start(length: int) -> int:
    """The shortest length in the same bucket."""
    return bucket(length) - _bucket_step(length) + 1


def _bucket_step(length: int) -> int:
    return 16 if length <= 64 else 1 << ((length - 1).bit_length() - 3)
