"""A layer's state from the rows of all tokens and what stays of them.

B batch, K KV heads, S tokens, C slots of a head.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.state import EMPTY, Kept, LayerSpec, LayerState, Rows
from kvjax_kernels import SplitRows, compact, split_rows
from kvjax_kernels.dispatch import implementation_of


def pack(rows: Rows, kept: Kept, spec: LayerSpec) -> LayerState:
    """The layer state that holds the tokens of `rows` that stay, each in its slot; one pass over the rows."""
    if kept.tokens is None and spec.is_uniform:
        return _first_rows(rows, kept, spec.shape)
    # Not within what is traced once: which kernel runs is recorded for every program.
    state, source = _placed(rows, kept, spec.shape)
    assert not isinstance(state.kv, SplitRows)
    kv = compact(state.kv, source, implementation=implementation_of(spec.implementation, "compact"))
    return state._replace(kv=split_rows(kv, spec.slots) if spec.split else kv)


# Jitted: what all layers of a model call is traced once.
@functools.partial(jax.jit, static_argnames="spec")
def _first_rows(rows: Rows, kept: Kept, spec: LayerSpec) -> LayerState:
    slots = spec.slots[0]
    positions = jnp.where(kept.held, rows.positions[:, :, : kept.held.shape[2]], EMPTY)
    kv = _prefix(rows.kv.astype(spec.dtype), slots, 0)
    return LayerState(
        kv=split_rows(kv, spec.slots) if spec.split else kv,
        positions=_prefix(positions, slots, EMPTY),
        lengths=kept.held.sum(-1, dtype=jnp.int32),
        scores=None if kept.scores is None else _prefix(kept.scores, slots, 0.0),
    )


@functools.partial(jax.jit, static_argnames="spec")
def _placed(rows: Rows, kept: Kept, spec: LayerSpec) -> tuple[LayerState, Int[Array, "B C"]]:
    """The state but for its kv rows, which are those of all heads and not moved yet; and where each slot's comes from.

    Sources are as `compact` takes them.
    """
    lengths = kept.held.sum(-1, dtype=jnp.int32)
    starts = _shared_starts(lengths, spec) if spec.shared else None
    source = _sources(kept, starts, lengths, spec, rows.positions.shape[2])
    batch = source.shape[0]

    def take(x: Array, fill: float) -> Array:
        taken = jnp.take_along_axis(x.reshape(batch, -1), jnp.maximum(source, 0), axis=1)
        return jnp.where(source >= 0, taken, jnp.asarray(fill, x.dtype))

    state = LayerState(
        kv=rows.kv.astype(spec.dtype).reshape(batch, -1, rows.kv.shape[-1]),
        positions=take(rows.positions, EMPTY),
        lengths=lengths,
        scores=None if kept.scores is None else take(kept.scores, 0.0),
        starts=starts,
    )
    return state, source


def _prefix(x: Array, slots: int, fill: float) -> Array:
    """The first `slots` along axis 2 of [B, K, S, ...], filled up where there are fewer, as [B, K * slots, ...]."""
    pad = [(0, 0)] * x.ndim
    pad[2] = (0, max(0, slots - x.shape[2]))
    x = jnp.pad(x[:, :, :slots], pad, constant_values=fill)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _sources(
    kept: Kept, starts: Int[Array, "B K"] | None, lengths: Int[Array, "B K"], spec: LayerSpec, length: int
) -> Int[Array, "B C"]:
    """For each slot of the layer, the row of the heads' rows laid one after another that it gets, or `EMPTY`."""
    batch, kv_heads, widest = kept.held.shape
    index = jnp.arange(widest, dtype=jnp.int32)[None, None] if kept.tokens is None else kept.tokens
    rows = jnp.where(kept.held, index + length * jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None], EMPTY)
    if spec.is_uniform:
        return _prefix(rows, spec.slots[0], EMPTY).astype(jnp.int32)
    if starts is None:
        parts = [_prefix(rows[:, head : head + 1], slots, EMPTY) for head, slots in enumerate(spec.slots)]
        return jnp.concatenate(parts, axis=1).astype(jnp.int32)
    slot = jnp.arange(sum(spec.slots), dtype=jnp.int32)[None]
    owner = (slot[:, None] >= starts[:, :, None]).sum(1, dtype=jnp.int32) - 1
    offset = slot - jnp.take_along_axis(starts, owner, axis=1)
    held = offset < jnp.take_along_axis(lengths, owner, axis=1)
    place = owner * widest + jnp.minimum(offset, widest - 1)
    return jnp.where(held, jnp.take_along_axis(rows.reshape(batch, -1), place, axis=1), EMPTY).astype(jnp.int32)


def _shared_starts(lengths: Int[Array, "B K"], spec: LayerSpec) -> Int[Array, "B K"]:
    """Segments as long as what each head holds, its room, and an equal part of what is left."""
    spare = (sum(spec.kept) - lengths.sum(-1, keepdims=True, dtype=jnp.int32)) // lengths.shape[1]
    ends = jnp.cumsum(lengths + spec.room + jnp.maximum(spare, 0), axis=1, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
