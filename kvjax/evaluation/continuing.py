"""What comes after a prefill: further tokens, layer by layer, and the answer.

B batch, T tokens of this call, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.allocation import bucket, bucket_start
from kvjax.model import Model
from kvjax.policies.base import Policy
from kvjax.prompts import Batch
from kvjax.rope import Rotation
from kvjax.state import EMPTY, Cache, LayerSpec, LayerState, for_platform
from kvjax.steps import decode_step


def extended(model: Model, cache: Cache, batch: Batch) -> tuple[Float[Array, "B T H"], Cache]:
    """Further tokens' hidden states, and the cache that has them too, as `kvjax.extend` gives it.

    One compiled program a layer, shared by layers that the policy treats alike.

    Args:
        model: the cache's.
        cache: what is remembered; it stays valid.
        batch: tokens for each row.
    """
    policy, total = cache.policy, np.asarray(cache.next_position) + batch.lengths
    policy.check_lengths(total)
    specs = policy.layer_specs(
        model.spec,
        bucket(int(total.max())),
        cache.room,
        shortest=bucket_start(int(total.min())),
        dtype=cache.specs[0].dtype,
    )
    specs = for_platform(specs, cache.specs[0].implementation)
    offset = np.arange(batch.tokens.shape[1])[None]
    place = np.asarray(cache.next_position)[:, None] + offset
    positions = jnp.asarray(np.where(offset < batch.lengths[:, None], place, EMPTY), jnp.int32)
    states = []

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        output, state = _extend_layer(
            cache.layers[layer],
            query,
            key,
            value,
            positions,
            policy=policy,
            spec=policy.representative(specs[layer]),
            held_spec=policy.representative(cache.specs[layer]),
            rope=model.spec.rope,
        )
        states.append(state)
        return output

    hidden = model(jnp.asarray(batch.tokens), attend)
    return hidden, Cache(tuple(states), jnp.asarray(total, jnp.int32), policy=policy, specs=specs, room=cache.room)


@functools.partial(jax.jit, static_argnames=("policy", "spec", "held_spec", "rope"))
def _extend_layer(
    state: LayerState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    policy: Policy,
    spec: LayerSpec,
    held_spec: LayerSpec,
    rope: Rotation,
) -> tuple[jax.Array, LayerState]:
    return policy.extend(spec, state, query, key, value, positions, rope, held_spec=held_spec)


def last_logits(model: Model, hidden: Float[Array, "B T H"], lengths: np.ndarray) -> Float[Array, "B V"]:
    """Scores of each row's next token."""
    last = jnp.take_along_axis(hidden, jnp.asarray(lengths - 1)[:, None, None], axis=1)[:, 0]
    return model.logits(last)


@jax.jit
def losses(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """-log p of each token."""
    log_probability = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.take_along_axis(log_probability, tokens[..., None], axis=-1)[..., 0]


class _Answer(NamedTuple):
    """What the compiled loop carries: the answers so far, the rows that go on, and the newest tokens."""

    cache: Cache
    tokens: Int[Array, "B M"]
    token: Int[Array, "B"]
    goes_on: Array
    step: Array


def greedy_answers(
    model: Model, logits: Float[Array, "B V"], cache: Cache, *, limits: np.ndarray, stops: tuple[int, ...]
) -> list[list[int]]:
    """The best token each time, up to a stop token or a row's limit; the stop token is left out.

    Args:
        model: the cache's.
        logits: of the first token.
        cache: what is remembered; it stays valid.
        limits: [B], at most the cache's room.
        stops: tokens that end an answer.
    """
    leaves, structure = jax.tree.flatten(model)
    stop_ids = jnp.asarray(stops, jnp.int32)
    tokens = np.asarray(
        _decoded(leaves, cache, logits, jnp.asarray(limits, jnp.int32), stop_ids, structure=structure, room=cache.room)
    )
    return [row[row >= 0].tolist() for row in tokens]


@functools.partial(jax.jit, static_argnames=("structure", "room"))
def _decoded(
    leaves: list[jax.Array],
    cache: Cache,
    logits: Float[Array, "B V"],
    limits: Int[Array, "B"],
    stops: Int[Array, "E"],
    *,
    structure: Any,
    room: int,
) -> Int[Array, "B M"]:
    """The answers, -1 behind their ends."""
    model: Model = jax.tree.unflatten(structure, leaves)

    def taken(now: _Answer, logits: jax.Array) -> _Answer:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        said = now.goes_on & ~(token[:, None] == stops[None]).any(-1)
        tokens = now.tokens.at[:, now.step].set(jnp.where(said, token, -1), mode="drop")
        step = now.step + 1
        return _Answer(now.cache, tokens, token, said & (step < limits), step)

    def body(now: _Answer) -> _Answer:
        logits, cache = decode_step(model, now.cache, jnp.where(now.goes_on, now.token, -1))
        return taken(now._replace(cache=cache), logits)

    rows = logits.shape[0]
    nothing = _Answer(
        cache=cache,
        tokens=jnp.full((rows, room), -1, jnp.int32),
        token=jnp.zeros(rows, jnp.int32),
        goes_on=jnp.ones(rows, bool),
        step=jnp.zeros((), jnp.int32),
    )
    return jax.lax.while_loop(lambda now: now.goes_on.any(), body, taken(nothing, logits)).tokens
