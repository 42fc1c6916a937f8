"""Pallas for TPU: the highest scores by counting, bit by bit, and their indices without sort, scan or gather."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from kvjax_kernels.pooled_selection.ranks import LOWEST, places
from kvjax_kernels.tpu_layout import LANES, SUBLANES, interpreter

# Rows of 128 scores that a step works on: those of one long head, or of several short ones, so that the time that a
# count takes to become a scalar is spent once for all of them.
_CHUNKS = 1024
# What fits the 16 MiB of VMEM that a kernel gets unasked, and what fits at all.
_UNASKED_SLOTS, _MOST_SLOTS = 2**18, 2**20
_VMEM_BYTES = 64 * 2**20


def unsupported_reason(scores: Float[Array, "B K S"], *_: Any, **__: Any) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    if scores.shape[2] > _MOST_SLOTS:
        return f"a head's scores must fit VMEM, {_MOST_SLOTS} slots, not {scores.shape[2]}"
    return None


def run(
    scores: Float[Array, "B K S"], counts: Int[Array, "B K"], *, most: int, interpret: bool = False
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """See `api.select_highest`."""
    batch, kv_heads, slots = scores.shape
    heads = batch * kv_heads
    padding = -slots % (SUBLANES * LANES)
    # NaN: what comes after a head's slots is never chosen before any of them.
    padded = jnp.pad(scores.astype(jnp.float32), ((0, 0), (0, 0), (0, padding)), constant_values=jnp.nan)
    chunks = (slots + padding) // LANES
    tiles = pl.cdiv(most, LANES)
    wanted = jnp.minimum(counts, most).astype(jnp.int32).reshape(heads, 1, 1)
    together = next(count for count in range(max(1, _CHUNKS // chunks), 0, -1) if heads % count == 0)

    def of_heads(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((together, *shape), lambda step: (step, 0, 0))

    index = pl.pallas_call(
        functools.partial(_selection_kernel, slots=slots),
        grid=(heads // together,),
        in_specs=[of_heads(1, LANES), of_heads(chunks, LANES)],
        out_specs=of_heads(tiles, LANES),
        out_shape=jax.ShapeDtypeStruct((heads, tiles, LANES), jnp.int32),
        scratch_shapes=[pltpu.VMEM((together, chunks, LANES), jnp.int32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=_VMEM_BYTES if slots > _UNASKED_SLOTS else None,
        ),
        interpret=interpreter(interpret),
        name="select_highest",
    )(jnp.broadcast_to(wanted, (heads, 1, LANES)), padded.reshape(heads, chunks, LANES))
    index = index.reshape(batch, kv_heads, -1)[..., :most]
    return jnp.minimum(index, slots - 1), index < slots


def _selection_kernel(wanted_ref, scores_ref, index_ref, work_ref, *, slots: int):
    """The indices of some heads, `slots` where there is none; `work_ref` holds places, then what is kept."""
    work_ref[...] = places(scores_ref[...])
    work_ref[...] = _kept(work_ref, wanted_ref[:, :, :1]).astype(jnp.int32)

    def one_head(head: jax.Array, carry: None) -> None:
        _write_indices(work_ref[head], wanted_ref[head], index_ref.at[head], slots)

    jax.lax.fori_loop(0, scores_ref.shape[0], one_head, None)


def _kept(places_ref, wanted: jax.Array) -> jax.Array:
    """Which slots [H, chunks, 128] are among the `wanted` [H, 1, 1] highest."""

    def count(mask: jax.Array) -> jax.Array:
        return mask.astype(jnp.int32).sum(axis=1, keepdims=True).sum(axis=2, keepdims=True)

    def refine(step: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.int32(1) << (30 - step))
        return jnp.where(count(places_ref[...] >= higher) >= wanted, higher, threshold)

    threshold = jnp.where(count(places_ref[...] >= 0) >= wanted, 0, LOWEST)
    threshold = jax.lax.fori_loop(0, 31, refine, threshold)
    ties = wanted - count(places_ref[...] > threshold)
    shape = places_ref.shape
    slot = _counting(shape, 1) * LANES + _counting(shape, 2)
    bits = (shape[1] * LANES).bit_length()

    # The first slot with enough ties before it.
    def extend(step: jax.Array, end: jax.Array) -> jax.Array:
        later = end | (jnp.int32(1) << (bits - 1 - step))
        before = count((places_ref[...] == threshold) & (slot < later))
        return jnp.where(before <= ties, later, end)

    end = jax.lax.fori_loop(0, bits, extend, jnp.zeros_like(wanted))
    return (places_ref[...] > threshold) | ((places_ref[...] == threshold) & (slot < end))


def _write_indices(kept: jax.Array, wanted: jax.Array, index_ref, slots: int) -> None:
    """Writes the slots that are kept [chunks, 128], ascending, into [tiles, 128].

    The j-th is in the chunk whose run of ranks holds j; a product with one-hot columns fetches that chunk's own
    ranks. Numbers up to 128 are exact in bfloat16, and so are their products with ones.
    """
    kept = kept.astype(jnp.float32)
    lower = _counting((LANES, LANES), 0) >= _counting((LANES, LANES), 1)
    # [128, chunks]: the kept slots of each chunk up to and with each lane.
    ranks = jax.lax.dot_general(
        lower.astype(jnp.bfloat16),
        kept.astype(jnp.bfloat16),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).astype(jnp.bfloat16)
    totals = jnp.broadcast_to(kept.sum(axis=1, keepdims=True), kept.shape)
    ends = _running_sum(totals)
    starts = ends - totals
    chunk = _counting(kept.shape, 0).astype(jnp.float32)

    def one_tile(tile: jax.Array, carry: None) -> None:
        order = tile * LANES + _counting((1, LANES), 1)
        place = order.astype(jnp.float32)
        here = (starts <= place) & (place < ends)
        mine = jnp.where(here, chunk, 0.0).sum(axis=0, keepdims=True)
        rank = place - jnp.where(here, starts, 0.0).sum(axis=0, keepdims=True)
        lanes = jnp.dot(ranks, here.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        lane = (lanes <= rank).astype(jnp.float32).sum(axis=0, keepdims=True)
        found = (mine * LANES + lane).astype(jnp.int32)
        index_ref[pl.ds(tile, 1), :] = jnp.where(order < wanted, found, slots)

    jax.lax.fori_loop(0, index_ref.shape[0], one_tile, None)


def _running_sum(x: jax.Array) -> jax.Array:
    """The sums of x [chunks, 128] down its rows."""
    row = _counting(x.shape, 0)
    shift = 1
    while shift < x.shape[0]:
        x = x + jnp.where(row >= shift, pltpu.roll(x, shift, 0), 0.0)
        shift *= 2
    return x


def _counting(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
