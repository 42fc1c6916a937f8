"""How the next token is chosen from its scores."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.scores import ABSENT


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
        if not self.temperature >= 0.0:
            raise ValueError(f"`temperature` must be 0 or more, got {self.temperature}.")
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 1):
            raise ValueError(f"`top_k` must be an integer of at least 1, got {self.top_k!r}.")
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not 0.0 < share <= 1.0:
                raise ValueError(f"`{name}` must be over 0 and at most 1, got {share}.")

    def arrays(self) -> "SamplingArrays | None":
        """The settings as traced values, so that only switching one on or off compiles again; None if greedy."""
        if self.temperature == 0.0:
            return None
        return SamplingArrays(
            temperature=jnp.asarray(self.temperature, jnp.float32),
            top_k=None if self.top_k is None else jnp.asarray(self.top_k, jnp.int32),
            top_p=None if self.top_p is None else jnp.asarray(self.top_p, jnp.float32),
            min_p=None if self.min_p is None else jnp.asarray(self.min_p, jnp.float32),
        )


class SamplingArrays(NamedTuple):
    """`Sampling` under jit; see there."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""] | None
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None


def row_keys(seed: int | Sequence[int], batch: int) -> jax.Array:
    """A key for each row: of seed + row, or of the row's own seed, so that a row does not depend on the others.

    Raises:
        ValueError: neither an integer nor one for each row.
    """
    if isinstance(seed, int | np.integer):
        seeds = [int(seed) + row for row in range(batch)]
    elif isinstance(seed, Sequence | np.ndarray) and all(map(_is_integer, seed)):
        seeds = [int(s) for s in seed]
    else:
        raise ValueError(f"`seed` must be an integer, or one for each row, got {seed!r}.")
    if len(seeds) != batch:
        raise ValueError(f"`seed` must be one number, or one for each of the {batch} rows, got {len(seeds)}.")
    # A key is made of 32 bits: seeds that are negative or larger wrap around.
    return jax.vmap(jax.random.key)(jnp.asarray(np.asarray([s % 2**32 for s in seeds], np.uint32)))


def _is_integer(x: object) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def choose(
    logits: Float[Array, "B V"], keys: jax.Array, step: Int[Array, "B"], sampling: SamplingArrays | None
) -> Int[Array, "B"]:
    """The next token of each row.

    Args:
        logits: scores.
        keys: [B], a key for each row.
        step: tokens that each row has drawn so far.
        sampling: None takes the best token.
    """
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = restrict(logits.astype(jnp.float32) / sampling.temperature, sampling)
    return jax.vmap(lambda key, n, row: jax.random.categorical(jax.random.fold_in(key, n), row))(
        keys, step, logits
    ).astype(jnp.int32)


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
