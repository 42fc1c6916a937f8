"""How the next token is chosen from its scores."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from kvjax.scores import ABSENT

_TINY, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of the choice; greedy by default.

    Attributes:
        temperature: 0 takes the best token; otherwise scores are divided by it.
        top_k: only the `top_k` best tokens, ties with the last of them included; None for all.
        top_p: only the best tokens that together have this probability (arXiv 1904.09751); None for all.
        min_p: only tokens with at least this share of the best one's probability (arXiv 2407.01082); None for all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= _number("temperature", self.temperature) < math.inf:
            finite = " and finite" if self.temperature == math.inf else ""
            raise ValueError(f"`temperature` must be 0 or more{finite}, got {self.temperature}.")
        if self.top_k is not None and (not is_integer(self.top_k) or self.top_k < 1):
            raise ValueError(f"`top_k` must be an integer of at least 1, got {self.top_k!r}.")
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not 0.0 < _number(name, share) <= 1.0:
                raise ValueError(f"`{name}` must be over 0 and at most 1, got {share}.")

    def arrays(self) -> "SamplingArrays | None":
        """The settings as traced values, so that only switching one on or off compiles again; None if greedy.

        A temperature that float32 has no normal number for is 0, and shares under its smallest one are that one:
        devices take smaller ones for 0.
        """
        if self.temperature < _TINY:
            return None
        return SamplingArrays(
            temperature=jnp.asarray(min(float(self.temperature), _LARGEST), jnp.float32),
            top_k=None if self.top_k is None else jnp.asarray(min(int(self.top_k), 2**31 - 1), jnp.int32),
            top_p=None if self.top_p is None else jnp.asarray(max(float(self.top_p), _TINY), jnp.float32),
            min_p=None if self.min_p is None else jnp.asarray(max(float(self.min_p), _TINY), jnp.float32),
        )


def _number(name: str, value: object) -> float:
    """A setting as a float; a ValueError unless it is one number."""
    if isinstance(value, np.ndarray | np.generic | jax.Array) and not isinstance(value, Tracer) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"`{name}` must be a number, got {value!r}.")
    return float(value)


class SamplingArrays(NamedTuple):
    """`Sampling` under jit; see there."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""] | None
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None


def row_keys(seed: object, batch: int) -> jax.Array:
    """A key for each row: of seed + row, or of the row's own seed, so that a row does not depend on the others.

    Args:
        seed: an integer, or one for each row.
        batch: rows.

    Raises:
        ValueError: neither an integer nor one for each row.
    """
    seeds = _integers(seed)
    if seeds is None:
        raise ValueError(f"`seed` must be an integer, or one for each row, got {seed!r}.")
    if isinstance(seeds, int):
        seeds = [seeds + row for row in range(batch)]
    if len(seeds) != batch:
        raise ValueError(f"`seed` must be one number, or one for each of the {batch} rows, got {len(seeds)}.")
    # A key is made of 32 bits: seeds that are negative or larger wrap around.
    return jax.vmap(jax.random.key)(jnp.asarray(np.asarray([s % 2**32 for s in seeds], np.uint32)))


def _integers(seed: object) -> int | list[int] | None:
    """A seed or several, of any integer type; None if it is something else."""
    if is_integer(seed):
        return operator.index(seed)  # pyright: ignore[reportArgumentType]
    if isinstance(seed, np.ndarray | jax.Array) and not isinstance(seed, Tracer):
        array = np.asarray(seed)
        return array.tolist() if array.dtype.kind in "iu" and array.ndim <= 1 else None
    if isinstance(seed, Sequence) and not isinstance(seed, str | bytes) and all(map(is_integer, seed)):
        return [operator.index(s) for s in seed]
    return None


def is_integer(x: object) -> bool:
    """Whether `x` is one integer: Python's, NumPy's or JAX's, and no bool."""
    if isinstance(x, np.ndarray | jax.Array):
        return not isinstance(x, Tracer) and x.ndim == 0 and x.dtype.kind in "iu"
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def choose(
    logits: Float[Array, "B V"], keys: jax.Array, step: Int[Array, "B"], sampling: SamplingArrays | None
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """The next token of each row, and whether its best score is finite.

    A row has no next token, and what is given for it is rubbish, where a score is NaN or infinite, or all are -inf;
    -inf for some tokens rules them out.

    Args:
        logits: scores.
        keys: [B], a key for each row.
        step: tokens that each row has drawn so far.
        sampling: None takes the best token.
    """
    if sampling is None:
        # NaN counts as the highest, so that the best score alone tells of any; no second pass over the scores.
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return token, jnp.isfinite(jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0])
    logits = logits.astype(jnp.float32)
    best = logits.max(-1, keepdims=True)
    # Without the best score a quotient could be infinite, and the difference of two such is NaN.
    logits = restrict((logits - best) / sampling.temperature, sampling)
    draw = jax.vmap(lambda key, n, row: jax.random.categorical(jax.random.fold_in(key, n), row))
    return draw(keys, step, logits).astype(jnp.int32), jnp.isfinite(best[:, 0])


def restrict(logits: Float[Array, "B V"], sampling: SamplingArrays) -> Float[Array, "B V"]:
    """Scores, divided by the temperature already, of the tokens that may be drawn; the others' are -inf."""
    if sampling.min_p is not None:
        best = logits.max(-1, keepdims=True)
        logits = jnp.where(logits < best + jnp.log(sampling.min_p), ABSENT, logits)
    if sampling.top_k is None and sampling.top_p is None:
        return logits
    descending = -jnp.sort(-logits, axis=-1)
    if sampling.top_k is not None:
        last = jnp.minimum(sampling.top_k, logits.shape[-1]) - 1
        threshold = jax.lax.dynamic_index_in_dim(descending, last, axis=-1)
        logits = jnp.where(logits < threshold, ABSENT, logits)
        descending = jnp.where(descending < threshold, ABSENT, descending)
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(descending, axis=-1)
        # A token stays if those before it do not reach top_p yet: the best always does.
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = jnp.where(before < sampling.top_p, descending, jnp.inf)
        logits = jnp.where(logits < kept.min(-1, keepdims=True), ABSENT, logits)
    return logits
