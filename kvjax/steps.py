"""The compiled steps: a prompt in, further tokens in, one token in."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from kvjax.allocation import bucket, bucket_start, check_choice
from kvjax.compiling import run_compiled
from kvjax.flattening import flatten
from kvjax.forward_only import forward_only
from kvjax.implementation import Ran, check_implementation
from kvjax.model import Model, check_mesh, check_model
from kvjax.policies.base import Policy
from kvjax.prompts import Batch, Behind, batch_of, check_new_tokens, check_policy, token_rows, warn_if_long
from kvjax.state import EMPTY, Attend, Cache, Known, LayerSpec, LayerState, for_platform
from kvjax_kernels.dispatch import Implementation, record

Logits = Literal["last", "all"]


def prefill(
    params: Model,
    tokens: object,
    *,
    policy: Policy,
    max_new_tokens: int,
    cache_dtype: object = None,
    logits: Logits = "last",
    implementation: str | Mapping[str, str] | None = None,
) -> tuple[jax.Array, Cache]:
    """Runs a prompt through the model and keeps what the policy keeps.

    Args:
        params: the model.
        tokens: ids [n] or [B, n], or a list of rows of different lengths.
        policy: which tokens stay.
        max_new_tokens: tokens to be decoded after it; the cache has room for them.
        cache_dtype: of cached keys and values, float32 or bfloat16; the model's by default.
        logits: "last", or "all" for every token of the prompt.
        implementation: which kernels run, here and in `extend` and `decode` of the cache: see `generate`.

    Returns:
        float32 logits [B, V] of each row's last token, or [B, T, V] of all (T the padded length; rubbish right of a
        row's end), and the cache.

    Raises:
        ValueError: arguments that cannot be; see the message.
        NotImplementedError: a forced implementation that cannot do this.
    """
    model, policy = check_model(params), check_policy(policy)
    room = check_new_tokens(max_new_tokens)
    check_choice("logits", logits, ("last", "all"))
    forced = check_implementation(implementation)
    batch = batch_of(token_rows(tokens, model=model.spec, argument="tokens"))
    scores, cache, _ = prefill_batch(
        model, batch, policy=policy, room=room, cache_dtype=cache_dtype, logits=logits, implementation=forced
    )
    return scores, cache


def prefill_batch(
    model: Model,
    batch: Batch,
    *,
    policy: Policy,
    room: int,
    cache_dtype: object = None,
    logits: Logits = "last",
    implementation: Implementation = None,
) -> tuple[jax.Array, Cache, Ran]:
    """`prefill` of checked arguments, and what ran."""
    leaves, structure = flatten(model)
    check_mesh(leaves)
    policy.check_lengths(batch.lengths)
    warn_if_long(policy, model.spec, batch.longest, room)
    shortest = bucket_start(int(batch.lengths.min()))
    specs = policy.layer_specs(
        model.spec, batch.tokens.shape[1], room, shortest=shortest, dtype=dtype_name(cache_dtype)
    )
    specs = for_platform(specs, implementation)
    scores, cache, ran = run_compiled(
        _prefill,
        leaves,
        batch.tokens,
        batch.lengths,
        structure=structure,
        policy=policy,
        specs=specs,
        room=room,
        logits=logits,
    )
    cache.known = Known(_last_tokens(batch))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        scores = forward_only(scores)
    return scores, cache, ran


def extend(
    params: Model, cache: Cache, tokens: object, *, max_new_tokens: int | None = None, logits: Logits = "last"
) -> tuple[jax.Array, Cache]:
    """Runs further tokens through the model: the next turn of a chat, or the next chunk of a prompt.

    Positions go on where each row stopped, whatever has been evicted. The policy compresses again to its budget; a
    fraction is one of all the tokens that the row has seen. The given cache stays valid.

    Args:
        params: the model that the cache belongs to.
        cache: what is remembered.
        tokens: ids [n] or [B, n], or a list of rows of different lengths; a row for each row of the cache.
        max_new_tokens: tokens to be decoded after it; as many as before by default.
        logits: "last", or "all" for every new token.

    Returns:
        Logits as `prefill` gives them, and the cache.

    Raises:
        ValueError: arguments that cannot be; see the message.
    """
    model = check_model(params)
    check_cache(model, cache)
    room = cache.room if max_new_tokens is None else check_new_tokens(max_new_tokens)
    check_choice("logits", logits, ("last", "all"))
    behind = Behind.cache(cache.known, len(cache.next_position), model.spec.stop_tokens)
    batch = batch_of(token_rows(tokens, model=model.spec, behind=behind, argument="tokens"))
    scores, cache, _ = extend_batch(model, cache, batch, room=room, logits=logits)
    return scores, cache


def extend_batch(
    model: Model, cache: Cache, batch: Batch, *, room: int, logits: Logits = "last"
) -> tuple[jax.Array, Cache, Ran]:
    """`extend` of checked arguments, and what ran."""
    if isinstance(cache.next_position, Tracer):
        raise ValueError(
            "`cache` must be of known arrays, got traced ones: how far its rows are gives shapes. Call this function "
            "outside of `jax.jit`; `kvjax.decode` can be called inside."
        )
    seen = np.asarray(cache.next_position)
    total = seen + batch.lengths
    cache.policy.check_lengths(total)
    if seen.max() <= model.spec.max_positions:
        # Once a stream is past it, every further chunk would say the same.
        warn_if_long(cache.policy, model.spec, int(total.max()), room)
    dtype = cache.specs[0].dtype
    shortest = bucket_start(int(total.min()))
    specs = cache.policy.layer_specs(model.spec, bucket(int(total.max())), room, shortest=shortest, dtype=dtype)
    specs = for_platform(specs, cache.specs[0].implementation)
    leaves, structure = flatten(model)
    check_mesh(leaves)
    scores, cache, ran = _extend(
        leaves, cache, batch.tokens, batch.lengths, structure=structure, specs=specs, room=room, logits=logits
    )
    cache.known = Known(_last_tokens(batch))
    return scores, cache, ran


def _last_tokens(batch: Batch) -> np.ndarray:
    return batch.tokens[np.arange(len(batch.lengths)), batch.lengths - 1]


def decode(params: Model, cache: Cache, token: object, *, donate: bool = True) -> tuple[jax.Array, Cache]:
    """Runs one token a row through the model.

    Args:
        params: the model that the cache belongs to.
        cache: what is remembered. It is donated: use the returned one from here on.
        token: ids [B], one for each row; a negative one leaves its row as it is (its logits are rubbish).
        donate: False keeps the given cache valid, at the cost of a copy.

    Returns:
        float32 logits [B, V] of the next token, and the cache.

    Raises:
        ValueError: the cache has no slot left for a row's token, or other arguments that cannot be.
    """
    model = check_model(params)
    check_cache(model, cache)
    leaves, structure = flatten(model)
    run = _decode_donated if donate else _decode
    if isinstance(token, Tracer):
        return run(leaves, cache, token, structure=structure)
    ids = np.asarray(token)
    rows = cache.next_position.shape
    if ids.shape != rows or ids.dtype.kind not in "iu":
        raise ValueError(
            f"`token` must be integers, one for each of the cache's {rows[0]} rows, "
            f"got {ids.dtype} of shape {ids.shape}."
        )
    if (ids >= model.spec.vocab_size).any():
        raise ValueError(f"`token` must be below {model.spec.vocab_size}, got {int(ids.max())}.")
    ids = ids.astype(np.int32)
    if isinstance(cache.next_position, Tracer):
        return run(leaves, cache, ids, structure=structure)
    active = ids >= 0
    free = check_room(cache, active)
    last = np.full(rows, -1) if cache.known is None else cache.known.last_tokens
    scores, cache = run(leaves, cache, ids, structure=structure)
    cache.known = Known(np.where(active, ids, last), free - active)
    return scores, cache


def check_cache(model: Model, cache: object) -> None:
    """Raises a ValueError unless `cache` is a cache of this model."""
    if not isinstance(cache, Cache):
        raise ValueError(f"`cache` must be a kvjax.Cache, got {type(cache).__name__}.")
    if any(_is_deleted(leaf) for leaf in jax.tree.leaves(cache)):
        raise ValueError(
            "`cache` was donated to an earlier call: use the cache that the call returned, or give "
            "`kvjax.decode(..., donate=False)`."
        )
    if cache.model != model.spec:
        raise ValueError(f"`cache` belongs to another model: {cache.model}, not {model.spec}.")


def _is_deleted(leaf: object) -> bool:
    return not isinstance(leaf, Tracer) and isinstance(leaf, jax.Array) and leaf.is_deleted()


def check_room(cache: Cache, rows: np.ndarray) -> np.ndarray:
    """Tokens that each row can still take, at least; a ValueError if one of `rows` [B] bool has no slot for another.

    The device is asked only where the host does not know, or the cache is full by its count.
    """
    free = None if cache.known is None else cache.known.free
    if free is None or (rows & (free < 1)).any():
        slots = _free_slots(cache)
        free = np.full(rows.shape, np.iinfo(np.int64).max) if slots is None else np.asarray(slots, np.int64)
    full = rows & (free < 1)
    if full.any():
        raise ValueError(
            f"the cache has no slot left for row {int(full.argmax())}: it was made with "
            f"`max_new_tokens={cache.room}`; ask for more, or make room with `kvjax.extend`."
        )
    return free


@jax.jit
def _free_slots(cache: Cache) -> Int[Array, "B"] | None:
    """Tokens that each row can still take in every layer; None where there is no end."""
    free = [cache.policy.free_slots(spec, state) for spec, state in zip(cache.specs, cache.layers, strict=True)]
    bounded = [slots for slots in free if slots is not None]
    return jnp.stack(bounded).min(0) if bounded else None


def dtype_name(dtype: object) -> str | None:
    """The name of a cache's dtype, or None for None; a ValueError if a cache cannot have it."""
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name  # pyright: ignore
    except TypeError:
        name = str(dtype)
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"`cache_dtype` must be float32 or bfloat16, got {name}.")
    return name


def _run(
    model: Model,
    tokens: Int[Array, "B T"],
    attend: Callable[[int, Any, Any, Any], tuple[jax.Array, LayerState]],
) -> tuple[Float[Array, "B T H"], tuple[LayerState, ...]]:
    """Hidden states, and the layers' states in order."""
    states: dict[int, LayerState] = {}
    layers = range(model.spec.num_layers)

    def collect(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if isinstance(layer, Tracer):
            raise ValueError(
                "the model called `attend` with a traced layer, as under `jax.lax.scan` over layers: layers have "
                "caches of different shapes, so call it from a Python loop with each layer's index."
            )
        if layer not in layers:
            raise ValueError(f"the model called `attend` for layer {layer!r}, and it has {len(layers)} layers.")
        output, states[layer] = attend(layer, query, key, value)
        return output

    collecting: Attend = collect
    hidden = model(tokens, collecting)
    missing = [layer for layer in layers if layer not in states]
    if missing:
        raise ValueError(f"the model did not call `attend` for layers {missing} of {model.spec.num_layers}.")
    return hidden, tuple(states[layer] for layer in layers)


def _chosen_first(attended: tuple[jax.Array, LayerState]) -> tuple[jax.Array, LayerState]:
    """A layer's output and state, both there before the next layer begins.

    Else a compiler may leave all choices to the end, and hold every layer's uncompressed rows until then.
    """
    return jax.lax.optimization_barrier(attended)


def _scores(model: Model, hidden: jax.Array, lengths: jax.Array, logits: Logits) -> jax.Array:
    if logits == "all":
        batch, length, size = hidden.shape
        return model.logits(hidden.reshape(batch * length, size)).reshape(batch, length, -1)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return model.logits(last)


@functools.partial(jax.jit, static_argnames=("structure", "policy", "specs", "room", "logits"))
def _prefill(
    leaves: list[jax.Array],
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    structure: Any,
    policy: Policy,
    specs: tuple[LayerSpec, ...],
    room: int,
    logits: Logits,
) -> tuple[jax.Array, Cache, Ran]:
    model: Model = jax.tree.unflatten(structure, leaves)
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(offset < lengths[:, None], offset, EMPTY)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, LayerState]:
        return _chosen_first(policy.prefill(specs[layer], query, key, value, positions, model.spec.rope))

    with record() as ran:
        hidden, layers = _run(model, tokens, attend)
    cache = Cache(layers, lengths, policy=policy, specs=specs, room=room)
    return _scores(model, hidden, lengths, logits), cache, Ran.of(ran)


@functools.partial(jax.jit, static_argnames=("structure", "specs", "room", "logits"))
def _extend(
    leaves: list[jax.Array],
    cache: Cache,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    structure: Any,
    specs: tuple[LayerSpec, ...],
    room: int,
    logits: Logits,
) -> tuple[jax.Array, Cache, Ran]:
    model: Model = jax.tree.unflatten(structure, leaves)
    offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(offset < lengths[:, None], cache.next_position[:, None] + offset, EMPTY)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, LayerState]:
        attended = cache.policy.extend(
            specs[layer],
            cache.layers[layer],
            query,
            key,
            value,
            positions,
            model.spec.rope,
            held_spec=cache.specs[layer],
        )
        return _chosen_first(attended)

    with record() as ran:
        hidden, layers = _run(model, tokens, attend)
    extended = Cache(layers, cache.next_position + lengths, policy=cache.policy, specs=specs, room=room)
    return _scores(model, hidden, lengths, logits), extended, Ran.of(ran)


def decode_step(model: Model, cache: Cache, token: Int[Array, "B"]) -> tuple[Float[Array, "B V"], Cache]:
    """`decode` as it is traced; negative tokens leave their row as it is."""
    active = token >= 0
    positions = jnp.where(active, cache.next_position, EMPTY)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, LayerState]:
        output, state = cache.policy.decode(
            cache.specs[layer],
            cache.layers[layer],
            query[:, 0],
            key[:, 0],
            value[:, 0],
            positions,
            model.spec.rope,
        )
        return output[:, None], state

    hidden, layers = _run(model, jnp.maximum(token, 0)[:, None], attend)
    advanced = cache.next_position + active.astype(jnp.int32)
    cache = Cache(layers, advanced, policy=cache.policy, specs=cache.specs, room=cache.room)
    return model.logits(hidden[:, 0]), cache


def _decode_leaves(
    leaves: list[jax.Array], cache: Cache, token: jax.Array, *, structure: Any
) -> tuple[jax.Array, Cache]:
    return decode_step(jax.tree.unflatten(structure, leaves), cache, token)


_decode = jax.jit(_decode_leaves, static_argnames="structure")
_decode_donated = jax.jit(_decode_leaves, static_argnames="structure", donate_argnames="cache")

__all__ = ["decode", "extend", "prefill"]
