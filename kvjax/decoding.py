"""The compiled loop that decodes tokens, and two ways to drive it: to the end, and watched token by token.

B batch, M new tokens, V vocabulary.
"""

import functools
import time
from collections.abc import Callable, Generator, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.implementation import Ran
from kvjax.model import Model
from kvjax.sampling import SamplingArrays, choose
from kvjax.state import Cache
from kvjax.steps import decode_step
from kvjax.text import TextStream
from kvjax_kernels.dispatch import record

#: Seconds that one call of the loop may take: an interrupt takes effect after it, and nothing goes on behind.
_CALL_SECONDS = 0.5
#: Tokens of the first call, whose speed is not known.
_FIRST_STEPS = 4
#: Tokens of a call, by what is alike.
_steps: dict[Hashable, int] = {}


class NewToken(NamedTuple):
    """What a streaming callback gets at every step.

    Attributes:
        tokens: [B] ids; -1 in rows that have ended.
        texts: for each row, the text that can be shown because of it; None without a tokenizer.
    """

    tokens: np.ndarray
    texts: list[str] | None


class Progress(NamedTuple):
    """What the compiled loop carries.

    Attributes:
        cache: of all tokens so far.
        logits: of the next token.
        tokens: the answers so far.
        counts: their lengths.
        active: rows that go on.
        broken: rows that ended because the scores of their next token are not finite.
    """

    cache: Cache
    logits: Float[Array, "B V"]
    tokens: Int[Array, "B M"]
    counts: Int[Array, "B"]
    active: Bool[Array, "B"]
    broken: Bool[Array, "B"]

    @classmethod
    def start(cls, cache: Cache, logits: Float[Array, "B V"], *, room: int) -> "Progress":
        """Nothing decoded yet."""
        rows = len(logits)
        return cls(
            cache=cache,
            logits=logits,
            tokens=jnp.zeros((rows, room), jnp.int32),
            counts=jnp.zeros(rows, jnp.int32),
            active=jnp.ones(rows, bool),
            broken=jnp.zeros(rows, bool),
        )


#: Up to so many tokens more for every active row, and what ran. The given progress is donated.
Advance = Callable[[Progress, int], tuple[Progress, Ran]]


def decode_all(progress: Progress, advance: Advance, *, alike: Hashable = None) -> tuple[Progress, Ran]:
    """Decodes to the end, in calls of about half a second.

    Args:
        progress: where to begin; it is donated.
        advance: decodes.
        alike: equal for loops of about the same speed, whose first calls then have the right length too.
    """
    left, ran = progress.tokens.shape[1], Ran(())
    steps = _steps.get(alike, _FIRST_STEPS)
    while left > 0:
        steps = min(steps, left)
        started = time.perf_counter()
        progress, ran = advance(progress, steps)
        goes_on = np.asarray(progress.active).any()
        left -= steps
        seconds = max(time.perf_counter() - started, 1e-6)
        steps = max(int(steps * _CALL_SECONDS / seconds), 1)
        # A longer call was compiled first.
        if alike is not None and seconds < 2 * _CALL_SECONDS:
            _steps[alike] = steps
        if not goes_on:
            break
    return progress, ran


def decode_watched(
    progress: Progress, advance: Advance, streams: list[TextStream] | None
) -> Generator[NewToken, None, tuple[Progress, Ran]]:
    """Decodes with the host looking at every token, which it yields; stop strings end their rows.

    Args:
        progress: where to begin; it is donated.
        advance: decodes.
        streams: the text of each row, or None.
    """
    active, counts, ran = np.asarray(progress.active), np.asarray(progress.counts), Ran(())
    longest = progress.tokens.shape[1]
    for step in range(longest):
        before, counted = active, counts
        progress, ran = advance(progress, 1)
        active, counts = np.asarray(progress.active), np.asarray(progress.counts)
        # A row that has one more token has it at this step's place.
        tokens = np.where(counts > counted, np.asarray(progress.tokens[:, step]), -1)
        pieces = None
        if streams is not None:
            pieces = [
                stream.add(int(token)) if token >= 0 else "" for stream, token in zip(streams, tokens, strict=True)
            ]
            halted = np.asarray([stream.stopped for stream in streams], bool)
            if (active & halted).any():
                active = active & ~halted
                progress = progress._replace(active=jnp.asarray(active))
            ended = before & ~active if step + 1 < longest else before
            for row in np.flatnonzero(ended):
                pieces[row] += streams[row].finish()
        yield NewToken(tokens, pieces)
        if not active.any():
            break
    return progress, ran


@functools.partial(jax.jit, static_argnames="structure", donate_argnames="progress")
def decode_loop(
    leaves: list[jax.Array],
    progress: Progress,
    *,
    structure: Any,
    stops: jax.Array,
    keys: jax.Array,
    sampling: SamplingArrays | None,
    steps: int | jax.Array,
) -> tuple[Progress, Ran]:
    """Up to `steps` tokens for every active row, and what runs."""
    model: Model = jax.tree.unflatten(structure, leaves)
    longest = progress.tokens.shape[1]
    row = jnp.arange(progress.tokens.shape[0])

    def goes_on(carry: tuple[jax.Array, Progress]) -> jax.Array:
        step, now = carry
        return (step < steps) & now.active.any()

    def body(carry: tuple[jax.Array, Progress]) -> tuple[jax.Array, Progress]:
        step, now = carry
        token, finite = choose(now.logits, keys, now.counts, sampling)
        takes = now.active & finite
        place = jnp.where(takes, now.counts, longest + row)
        tokens = now.tokens.at[row, place].set(token, mode="drop", unique_indices=True)
        counts = now.counts + takes.astype(jnp.int32)
        # The last token goes through the model too, so that the cache holds all that is returned.
        logits, cache = decode_step(model, now.cache, jnp.where(takes, token, -1))
        ended = (token[:, None] == stops[None]).any(-1) | (counts >= longest)
        broken = now.broken | (now.active & ~finite)
        return step + 1, Progress(cache, logits, tokens, counts, takes & ~ended, broken)

    with record() as ran:
        _, progress = jax.lax.while_loop(goes_on, body, (jnp.zeros((), jnp.int32), progress))
    return progress, Ran.of(ran)
