"""A Mosaic TPU kernel that copies each head's own slots from HBM, several blocks ahead of their use.

One grid step is a KV head of a row. A grid over blocks as well would load them ahead by itself, but it has as many
steps as the capacity has blocks, at about 0.35 us each: 6 ms a layer for 32 rows of 8 heads of 128K slots, however
short they are. Here a block past a head's length costs nothing, and an empty head one step. The queue of loads runs
on over the ends of heads, so that short heads keep the memory as busy as long ones.

A load is cut to the head's length, rounded to tiles of the HBM layout. The tiles in which a head begins and ends may
hold a neighbour's slots, or anything: they are masked, and their values zeroed, because 0 times NaN is NaN.

XLA lays out a cache whose rows fill the 128 lanes (head sizes 64, 128, 256) row by row, and one of other sizes
transposed, with the slots in the lanes. The kernel reads either as it lies; anything else would copy the whole cache
at every call. Only where S is not a multiple of 8, and rows fill the lanes, does XLA store B inside S, and copy it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvjax_kernels.masking import MASKED
from kvjax_kernels.ragged_decode_attention.parts import APART, combined
from kvjax_kernels.ragged_decode_attention.tpu_plan import (
    Plan,
    Span,
    loaded_slots,
    make_plan,
    span,
)
from kvjax_kernels.ragged_decode_attention.types import DecodeAttention, Parts
from kvjax_kernels.split_rows import SplitRows, head_starts
from kvjax_kernels.tpu_layout import LANES, SUBLANES, interpreter, round_up

# HBM's latency of one to two microseconds times its 0.8 to 1.6 TB/s must be under way: 3.5 MB are, beside the block
# in use.
_BUFFERS = 8
# The second query is multiplied with so many slots of a head's first block; the head begins up to 127 slots into it.
_NEAR_SINKS = 2 * LANES
# Starts and lengths take half of SMEM.
_MOST_HEADS = 65536
# What a core remembers from one grid step to the next: the item and the block that are loaded next, how many loads
# were issued, and how many are used up.
_ITEM, _BLOCK, _ISSUED, _USED = range(4)


def unsupported_reason(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"] | SplitRows,
    lengths: Int[Array, "B K"],
    *,
    sinks: int,
    **_: Any,
) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    if isinstance(kv, SplitRows):
        return APART
    return unsupported_shapes(query, kv, lengths, sinks=sinks)


def unsupported_shapes(
    query: Float[Array, "B N D"], kv: Float[Array, "B S twoD"], lengths: Int[Array, "B K"], *, sinks: int = 0
) -> str | None:
    """Why the kernel cannot do this on any TPU; None if it can."""
    for name, x in (("query", query), ("kv", kv)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"`{name}` must be float32 or bfloat16, got {x.dtype}"
    if query.shape[-1] % 16:
        return f"the head size must be a multiple of 16, got {query.shape[-1]}"
    if sinks > _NEAR_SINKS - LANES:
        return f"at most {_NEAR_SINKS - LANES} slots can have a second query, got {sinks}"
    if lengths.size > _MOST_HEADS:
        return f"at most {_MOST_HEADS} lengths fit on chip, got {lengths.size}"
    return None


def run(
    query: Float[Array, "B N D"], kv: Float[Array, "B S twoD"], lengths: Int[Array, "B K"], **settings: Any
) -> DecodeAttention:
    """See `api.ragged_decode_attention`."""
    return combined(attend_parts, query, kv, lengths, **settings)


def attend_parts(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"],
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...] | None,
    starts: Int[Array, "B K"],
    scale: float,
    sink_query: Float[Array, "B N D"] | None,
    sinks: int,
    scores: bool,
    interpret: bool,
    cores: int | None = None,
) -> Parts:
    """Attention over each head's cached tokens; see `api.ragged_decode_attention`, and `make_plan` for `cores`."""
    batch, query_heads, head_dim = query.shape
    kv_heads = lengths.shape[1]
    group = query_heads // kv_heads
    rows = round_up(group, SUBLANES)
    plan = make_plan(kv, kv_heads, segments=segments, scale=scale, sinks=sinks, cores=cores)

    def by_head(x: Float[Array, "B N D"]) -> Float[Array, "heads R W"]:
        """In the cache's dtype; [q | 0] where keys are not cut out, so that [q | 0] . [k | v] = q . k."""
        grouped = x.astype(kv.dtype).reshape(plan.heads, group, head_dim)
        return jnp.pad(grouped, ((0, 0), (0, rows - group), (0, 0 if plan.cuts else head_dim)))

    output, log_sum_exp, *score_rows = _call(
        starts.astype(jnp.int32).reshape(-1),
        lengths.astype(jnp.int32).reshape(-1),
        [by_head(x) for x in (query, sink_query) if x is not None],
        kv.swapaxes(1, 2) if plan.slots_last else kv,
        plan=plan,
        scores=scores,
        interpret=interpret,
    )

    def by_part(x: Float[Array, "items *_"]) -> Float[Array, "B K P *_"]:
        return jnp.moveaxis(x.reshape(plan.parts, batch, kv_heads, *x.shape[1:]), 0, 2)

    parts = Parts(by_part(output[:, :group, -head_dim:]), by_part(log_sum_exp[:, :group, 0]))
    if not scores:
        return parts
    found = score_rows[0].reshape(batch, kv_heads, rows, plan.columns)[:, :, :group]
    if segments is None:
        return parts._replace(scores=found, origins=starts - lax.rem(starts, jnp.int32(plan.tile)))
    return parts._replace(scores=_from_first_slots(found, [start % plan.tile for start in head_starts(segments)]))


def _from_first_slots(scores: Float[Array, "B K G C"], begins: list[int]) -> Float[Array, "B K G C"]:
    """Moves each head's first slot, which is in column `begins` of its scores, to the first column."""
    if not any(begins):
        return scores
    moved = [jnp.pad(scores[:, head, :, begin:], ((0, 0), (0, 0), (0, begin))) for head, begin in enumerate(begins)]
    return jnp.stack(moved, axis=1)


def _call(
    starts: Int[Array, " heads"],
    lengths: Int[Array, " heads"],
    queries: list[jax.Array],
    kv: jax.Array,
    *,
    plan: Plan,
    scores: bool,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The kernel over all items: output [items, R, W], log-sum-exps in each lane of [items, R, 128], and scores."""
    _, rows, width = queries[0].shape

    def of_head(core: jax.Array, step: jax.Array, *_: Any) -> tuple[jax.Array, int, int]:
        return lax.rem(core * plan.steps + step, jnp.int32(plan.heads)), 0, 0

    def of_item(core: jax.Array, step: jax.Array, *_: Any) -> tuple[jax.Array, int, int]:
        return core * plan.steps + step, 0, 0

    one_block = (2 * plan.head_dim, plan.block) if plan.slots_last else (plan.block, 2 * plan.head_dim)
    out_shape = [jax.ShapeDtypeStruct((plan.parts * plan.heads, rows, x), jnp.float32) for x in (width, LANES)]
    out_specs = [pl.BlockSpec((None, rows, x), of_item) for x in (width, LANES)]
    scratch = [
        pltpu.VMEM((_BUFFERS, *one_block), kv.dtype),
        pltpu.SemaphoreType.DMA((_BUFFERS,)),
        pltpu.SMEM((4,), jnp.int32),
    ]
    if scores:
        out_shape.append(jax.ShapeDtypeStruct((plan.heads, rows, plan.columns), jnp.float32))
        out_specs.append(pl.BlockSpec(memory_space=pl.ANY))
        scratch += [pltpu.VMEM((2, rows, plan.block), jnp.float32), pltpu.SemaphoreType.DMA((2,))]
    # HBM is padded to whole tiles, which a load may copy; the interpreter's memory is not.
    beyond = "uninitialized" if kv.shape[2 if plan.slots_last else 1] % plan.tile else "raise"
    return pl.pallas_call(
        functools.partial(_kernel, plan, scores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.cores, plan.steps),
            in_specs=[
                *[pl.BlockSpec((None, rows, width), of_head) for _ in queries],
                # Not ANY: a small cache would be moved to VMEM, all of it.
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shape,
        interpret=interpreter(interpret, out_of_bounds_reads=beyond),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="ragged_decode_attention",
    )(starts, lengths, *queries, kv)


@dataclasses.dataclass(frozen=True)
class _Loads:
    """The queue of a core's loads, in the order of its items and their blocks; `state` remembers how far it is."""

    plan: Plan
    starts: Any
    lengths: Any
    kv: Any
    buffers: Any
    arrived: Any
    state: Any

    def head(self, item: jax.Array) -> jax.Array:
        return item if self.plan.parts == 1 else lax.rem(item, jnp.int32(self.plan.heads))

    def span(self, item: jax.Array) -> Span:
        part = 0 if self.plan.parts == 1 else lax.div(item, jnp.int32(self.plan.heads))
        return span(self.starts[self.head(item)], self.lengths[self.head(item)], part, self.plan)

    def copy(self, item: jax.Array, of: Span, index: jax.Array, turn: jax.Array) -> Any:
        """The load of one block of an item, into the buffer whose turn it is."""
        plan = self.plan
        row = lax.div(self.head(item), jnp.int32(plan.kv_heads))
        count = pl.multiple_of(loaded_slots(of, index, plan), plan.tile)
        source = pl.ds(pl.multiple_of(of.origin + index * plan.block, plan.tile), count)
        number = lax.rem(turn, jnp.int32(_BUFFERS))
        if plan.slots_last:
            ends = self.kv.at[row, :, source], self.buffers.at[number, :, pl.ds(0, count)]
        else:
            ends = self.kv.at[row, source], self.buffers.at[number, pl.ds(0, count)]
        return pltpu.make_async_copy(*ends, self.arrived.at[number])

    def restart(self, item: jax.Array, end: jax.Array) -> None:
        """Begins with an item, and fills all buffers but one."""
        for place, value in ((_ITEM, item), (_BLOCK, self.span(item).first), (_ISSUED, 0), (_USED, 0)):
            self.state[place] = jnp.int32(value)
        lax.fori_loop(0, _BUFFERS - 1, lambda *_: self.issue(end), None)

    def issue(self, end: jax.Array) -> None:
        """Starts the next load, if an item before `end` has one left."""

        def used_up(at: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (at[0] < end) & (at[1] >= self.span(jnp.minimum(at[0], end - 1)).last)

        def next_item(at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return at[0] + 1, self.span(jnp.minimum(at[0] + 1, end - 1)).first

        item, index = lax.while_loop(used_up, next_item, (self.state[_ITEM], self.state[_BLOCK]))
        turn = self.state[_ISSUED]

        @pl.when(item < end)
        def _() -> None:
            self.copy(item, self.span(item), index, turn).start()
            self.state[_ISSUED] = turn + 1

        self.state[_ITEM], self.state[_BLOCK] = item, index + 1


def _kernel(plan: Plan, scores: bool, *refs: Any) -> None:
    """One item; see `_call` for the refs."""
    take = iter(refs).__next__
    starts, lengths, query = take(), take(), take()
    sink_query = take() if plan.sinks else None
    kv, output, log_sum_exp = take(), take(), take()
    scores_out = take() if scores else None
    loads = _Loads(plan, starts, lengths, kv, buffers=take(), arrived=take(), state=take())
    waiting, departed = (take(), take()) if scores else (None, None)
    begin = pl.program_id(0) * plan.steps
    end = begin + plan.steps
    item = begin + pl.program_id(1)
    pl.when(pl.program_id(1) == 0)(lambda: loads.restart(item, end))
    of, used = loads.span(item), loads.state[_USED]

    def departure(index: jax.Array) -> Any:
        """The copy of a block's scores to HBM."""
        assert waiting is not None
        assert departed is not None
        assert scores_out is not None
        number = lax.rem(index - of.first, jnp.int32(2))
        columns = pl.ds(pl.multiple_of(index * plan.block, plan.block), plan.block)
        return pltpu.make_async_copy(
            waiting.at[number], scores_out.at[loads.head(item), :, columns], departed.at[number]
        )

    def step(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        turn = used + index - of.first
        loads.issue(end)
        loads.copy(item, of, index, turn).wait()
        block = loads.buffers.at[lax.rem(turn, jnp.int32(_BUFFERS))]
        start, stop = of.start - index * plan.block, of.stop - index * plan.block
        pl.when((start > 0) | (stop < plan.block))(lambda: _zero_others(block, start, stop, plan))
        found = _scores(query, block, plan)
        if sink_query is not None:
            found = lax.cond(index == 0, lambda: _with_sinks(found, sink_query, block, start, plan), lambda: found)
        if waiting is not None:
            pl.when(index >= of.first + 2)(lambda: departure(index - 2).wait())
            waiting[lax.rem(index - of.first, jnp.int32(2))] = found
            departure(index).start()
        column = lax.broadcasted_iota(jnp.int32, found.shape, 1)
        found = jnp.where((column >= start) & (column < stop), found, MASKED)
        largest, total, values = carry
        # Every block holds a slot of the head, so `now` is the score of one, and masked ones weigh exp(-1e30) = 0.
        now = jnp.maximum(largest, found.max(axis=1, keepdims=True))
        weights, kept = jnp.exp(found - now), jnp.exp(largest - now)
        values = kept * values + _weighted_values(weights, block, plan)
        return now, kept * total + weights.sum(axis=1, keepdims=True), values

    rows = query.shape[0]
    nothing = jnp.full((rows, 1), MASKED), jnp.zeros((rows, 1)), jnp.zeros(output.shape)
    largest, total, values = lax.fori_loop(of.first, of.last, step, nothing)
    loads.state[_USED] = used + of.last - of.first
    if scores:
        for back in (2, 1):
            pl.when(of.last >= of.first + back)(lambda back=back: departure(of.last - back).wait())
    safe = jnp.where(total > 0, total, 1.0)
    output[...] = values / safe
    log_sum_exp[...] = jnp.broadcast_to(largest + jnp.log(safe), log_sum_exp.shape)


def _keys(block: Any, plan: Plan) -> Any:
    if not plan.cuts:
        return block
    return block.at[: plan.head_dim] if plan.slots_last else block.at[:, : plan.head_dim]


def _values(block: Any, plan: Plan) -> Any:
    if not plan.cuts:
        return block
    return block.at[plan.head_dim :] if plan.slots_last else block.at[:, plan.head_dim :]


def _zero_others(block: Any, start: jax.Array, stop: jax.Array, plan: Plan) -> None:
    """Zeroes the values of slots before `start` and from `stop` on; their whole rows, where values are not cut out."""
    values = _values(block, plan)
    slot = lax.broadcasted_iota(jnp.int32, values.shape, 1 if plan.slots_last else 0)
    values[...] = jnp.where((slot >= start) & (slot < stop), values[...], jnp.zeros((), values.dtype))


def _scores(query: Any, block: Any, plan: Plan) -> jax.Array:
    return _product(query[...], _keys(block, plan)[...], over=0 if plan.slots_last else 1) * plan.scale


def _with_sinks(found: jax.Array, sink_query: Any, block: Any, start: jax.Array, plan: Plan) -> jax.Array:
    """The scores of a head's first block, with the second query's for its first slots."""
    slots = min(_NEAR_SINKS, plan.block)
    to_sinks = _scores(sink_query, block.at[:, :slots] if plan.slots_last else block.at[:slots], plan)
    column = lax.broadcasted_iota(jnp.int32, to_sinks.shape, 1)
    near = jnp.where(column < start + plan.sinks, to_sinks, found[:, :slots])
    return near if slots == plan.block else jnp.concatenate([near, found[:, slots:]], axis=1)


def _weighted_values(weights: jax.Array, block: Any, plan: Plan) -> jax.Array:
    values = _values(block, plan)[...]
    return _product(weights.astype(values.dtype), values, over=1 if plan.slots_last else 0)


def _product(a: jax.Array, b: jax.Array, *, over: int) -> jax.Array:
    """In float32: [M, X] times [N, X] over its axis 1, or times [X, N] over its axis 0."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(a, b, (((1,), (over,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
