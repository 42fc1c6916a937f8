"""Mosaic GPU kernel, for Hopper and newer: one block of threads for each part of each KV head's tokens.

Rows arrive by bulk copies, key and value together, one block of rows ahead of the one that is computed on. All query
heads of a group share them: they are the rows of the tensor cores' products.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax_kernels import mosaic_gpu
from kvjax_kernels.devices import missing_nvidia_gpu
from kvjax_kernels.masking import MASKED
from kvjax_kernels.ragged_decode_attention.parts import APART, combined
from kvjax_kernels.ragged_decode_attention.types import DecodeAttention, Parts
from kvjax_kernels.split_rows import SplitRows

# A block of rows in 16 bits, in bytes. Two are in flight. With the 9 KB that a block of threads needs beside them,
# three fit into a multiprocessor, whose copies and arithmetic overlap.
_BLOCK_BYTES = 32 * 1024
_STAGES = 2
# Blocks of threads for each multiprocessor: twice as many as run at once, so that short ones even out.
_THREAD_BLOCKS = 6

_GRID = ("row", "head", "part")


def unsupported_reason(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"] | SplitRows,
    lengths: Int[Array, "B K"],
    *,
    interpret: bool,
    **_: Any,
) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    if isinstance(kv, SplitRows):
        return APART
    missing = None if interpret else missing_nvidia_gpu(query, least=mosaic_gpu.OLDEST)
    return unsupported_shapes(query, kv, lengths, interpret=interpret) or missing


def unsupported_shapes(
    query: Float[Array, "B N D"], kv: Float[Array, "B S twoD"], lengths: Int[Array, "B K"], *, interpret: bool = False
) -> str | None:
    """Why the kernel cannot do this on any GPU; None if it can."""
    group = query.shape[1] // lengths.shape[1]
    return mosaic_gpu.unsupported_heads(kv.dtype, query.shape[2], group=group, interpret=interpret)


def run(
    query: Float[Array, "B N D"], kv: Float[Array, "B S twoD"], lengths: Int[Array, "B K"], **settings: Any
) -> DecodeAttention:
    """See `api.ragged_decode_attention`."""
    return combined(attend_parts, query, kv, lengths, **settings)


def block_rows(head_dim: int) -> int:
    """Rows that are copied and computed on at a time."""
    return min(_BLOCK_BYTES // (4 * head_dim) // mosaic_gpu.COLUMNS * mosaic_gpu.COLUMNS, 128)


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
) -> Parts:
    """See `api.ragged_decode_attention`; `scores` says whether the scores are wanted too."""
    (batch, heads, head_dim), kv_heads = query.shape, lengths.shape[1]
    longest = kv.shape[1] if segments is None else max(segments)
    kernel = _Kernel(
        head_dim=head_dim,
        group=heads // kv_heads,
        dtype=kv.dtype,
        block=block_rows(head_dim),
        parts=mosaic_gpu.count_parts(
            batch * kv_heads, -(-longest // block_rows(head_dim)), thread_blocks=_THREAD_BLOCKS
        ),
        scale=scale,
        sinks=sinks,
        scores=scores,
        interpret=interpret,
    )
    queries = [query] if sink_query is None else [query, sink_query]
    stacked = jnp.stack([x.astype(kv.dtype).reshape(batch, kv_heads, -1, head_dim) for x in queries], axis=2)
    output, sums, *given = kernel.launch(batch, kv_heads, longest)(stacked, kv, starts, lengths)
    largest, total = (sums[:, :, :, i, : kernel.group] for i in range(2))
    empty = total == 0
    safe = jnp.where(empty, 1.0, total)
    return Parts(
        output=output / safe[..., None],
        log_sum_exp=jnp.where(empty, MASKED, (largest + jnp.log2(safe)) * math.log(2)),
        scores=given[0] if scores else None,
    )


class _Held(NamedTuple):
    """What a block of threads holds in shared memory beside the rows.

    Attributes:
        query: [A, D / W, R, W], the group's queries, and those for the sinks if there are any, in tiles.
        weights: [block / V, R, V], of a block's tokens, in tiles.
        sums: [2, R], each query head's largest score in base 2 and total weight.
        score: [R, block], the scores on their way out; None if they are not wanted.
        arrived: whether the queries have.
    """

    query: Any
    weights: Any
    sums: Any
    score: Any
    arrived: Any


class _Running(NamedTuple):
    """The softmax so far, in registers: weighted values [R, W] by tile; [R] largest score in base 2, total weight."""

    values: tuple[jax.Array, ...]
    largest: jax.Array
    total: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    """The kernel's settings, and what one block of threads does."""

    head_dim: int
    group: int
    dtype: Any
    block: int
    parts: int
    scale: float
    sinks: int
    scores: bool
    interpret: bool

    @property
    def rows(self) -> int:
        """Rows of the products; those past the group's hold anything, and are not written out."""
        return -(-self.group // mosaic_gpu.ROWS) * mosaic_gpu.ROWS

    @property
    def width(self) -> int:
        """Columns of a tile of keys or values."""
        return mosaic_gpu.tile_width(self.head_dim, self.dtype)

    @property
    def tiles(self) -> int:
        """Tiles of a row of keys, and as many of values."""
        return self.head_dim // self.width

    @property
    def layouts(self) -> tuple[Any, Any, Any]:
        """Of a product's operands and of its sums, in the registers of four warps, one or two of them down the rows."""
        layout, down = plgpu.Layout, self.rows // mosaic_gpu.ROWS
        left, right, sums = (x(self.dtype, m_warps=down) for x in (layout.MMA_LHS, layout.MMA_RHS, layout.MMA_ACC))
        return left, right, sums

    def launch(self, batch: int, kv_heads: int, longest: int) -> Any:
        """The kernel over its grid: from queries, kv, starts and lengths to outputs, sums and perhaps scores."""
        grid = (batch, kv_heads, self.parts)
        shapes: list[tuple[int, ...]] = [(*grid, self.group, self.head_dim), (*grid, 2, self.rows)]
        if self.scores:
            shapes.append((batch, kv_heads, self.group, -(-longest // self.block) * self.block))
        return plgpu.kernel(
            self,
            out_type=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
            grid=grid,
            grid_names=_GRID,
            scratch_types=[self.scratch()],
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=mosaic_gpu.interpreter(self.interpret),
            kernel_name="ragged_decode_attention",
        )

    def scratch(self) -> _Held:
        """The types of what is held."""
        queries, wide = 1 + (self.sinks > 0), mosaic_gpu.tile_width(self.block, self.dtype)
        tile = functools.partial(mosaic_gpu.tile, dtype=self.dtype)
        return _Held(
            query=plgpu.SMEM((queries, self.tiles, self.rows, self.width), self.dtype, transforms=tile(self.width)),
            weights=plgpu.SMEM((self.block // wide, self.rows, wide), self.dtype, transforms=tile(wide)),
            sums=plgpu.SMEM((2, self.rows), jnp.float32),
            score=plgpu.SMEM((self.rows, self.block), jnp.float32) if self.scores else None,
            arrived=plgpu.Barrier(num_arrivals=queries * self.tiles),
        )

    def __call__(self, query_ref, kv_ref, starts_ref, lengths_ref, output_ref, sums_ref, *rest) -> None:
        """Attends to one part of one head's tokens."""
        score_ref, held = rest if self.scores else (None, *rest)
        row, head, part = (lax.axis_index(name) for name in _GRID)
        length, start = lengths_ref[row, head], starts_ref[row, head]
        first, steps = mosaic_gpu.share(length, part, parts=self.parts, block=self.block)
        self.load_queries(query_ref.at[row, head], held)

        def step(index, *tiles_and_running) -> _Running:
            *tiles, running = tiles_and_running
            offset = (first + index[0]) * self.block
            out = None if score_ref is None else score_ref.at[row, head, :, pl.ds(offset, self.block)]
            return self.step(tiles[: self.tiles], tiles[self.tiles :], running, held, out, offset, length - offset)

        def tile_spec(column: int) -> plgpu.BlockSpec:
            return plgpu.BlockSpec(
                (pl.Element(self.block), self.width),
                lambda index: (start + (first + index) * self.block, column),
                transforms=mosaic_gpu.tile(self.width, self.dtype),
            )

        copies = 2 * self.tiles
        running = plgpu.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[tile_spec(column) for column in range(copies)],
            max_concurrent_steps=_STAGES,
            init_carry=self.nothing(),
        )(*[kv_ref.at[row]] * copies)
        finish = functools.partial(
            self.finish, running, held, output_ref.at[row, head, part], sums_ref.at[row, head, part]
        )
        # Held only now, in the shared memory that the rows have left.
        pl.run_scoped(finish, plgpu.SMEM((self.rows, self.head_dim), jnp.float32))

    def load_queries(self, query_ref, held: _Held) -> None:
        """Fills the first rows of the products' left operands."""
        for which, tile in np.ndindex(*held.query.shape[:2]):
            source = query_ref.at[which, :, pl.ds(tile * self.width, self.width)]
            plgpu.copy_gmem_to_smem(source, held.query.at[which, tile, pl.ds(0, self.group)], held.arrived)
        plgpu.barrier_wait(held.arrived)

    def nothing(self) -> _Running:
        """The softmax of no token."""
        *_, layout = self.layouts
        values = mosaic_gpu.filled((self.rows, self.width), 0.0, layout)
        largest, total = (mosaic_gpu.filled((self.rows,), x, layout.reduce(1)) for x in (MASKED, 0.0))
        return _Running((values,) * self.tiles, largest, total)

    def step(self, keys, values, running: _Running, held: _Held, score_ref, offset, left) -> _Running:
        """Attends to the block of rows from `offset` on, of which no more than the first `left` are held."""
        *_, layout = self.layouts
        scores = self.score(keys, held, offset)
        if score_ref is not None:
            self.send(scores, held.score, score_ref)
        # In base 2, as the hardware's exponential is.
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
        scores = jnp.where(column < left, scores * (self.scale * math.log2(math.e)), MASKED)
        largest = jnp.maximum(running.largest, scores.max(axis=1))
        shrunk = jnp.exp2(running.largest - largest)
        weights = jnp.exp2(scores - self.across(largest, scores.shape))
        # Through shared memory: the next product needs all columns in every warp, which has computed some.
        width = held.weights.shape[2]
        for tile in range(held.weights.shape[0]):
            held.weights[tile] = weights[:, tile * width : (tile + 1) * width].astype(self.dtype)
        pl.when(left < self.block)(functools.partial(self.clear, values, left))
        plgpu.commit_smem()
        summed = [
            self.add(sums * self.across(shrunk, sums.shape), held.weights, tile)
            for sums, tile in zip(running.values, values, strict=True)
        ]
        # All have read the rows before the next copy overwrites them.
        plgpu.commit_smem()
        return _Running(tuple(summed), largest, running.total * shrunk + weights.sum(axis=1))

    def across(self, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """One value a row, for each column."""
        *_, layout = self.layouts
        return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [0]), layout)

    def score(self, keys, held: _Held, offset) -> jax.Array:
        """Products of the queries with a block's keys, unscaled."""
        left, right, layout = self.layouts
        shape = (self.rows, self.block)

        def products(which: int) -> jax.Array:
            sums = mosaic_gpu.filled(shape, 0.0, layout)
            for tile, key in enumerate(keys):
                query = plgpu.load(held.query.at[which, tile], layout=left)
                key = plgpu.load(key.transpose((1, 0)), layout=right)
                sums = mosaic_gpu.product(sums, query, key, interpret=self.interpret)
            return sums

        scores = products(0)
        if not self.sinks:
            return scores
        slot = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + offset
        return lax.cond(offset < self.sinks, lambda: jnp.where(slot < self.sinks, products(1), scores), lambda: scores)

    def send(self, scores: jax.Array, score, score_ref) -> None:
        """Sends scaled scores out of shared memory, once the ones before are gone."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mosaic_gpu.store(score, scores * self.scale)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(score.at[pl.ds(0, self.group)], score_ref)

    def clear(self, values, left) -> None:
        """Zeros in the rows that are not held: their weights are 0, and 0 * NaN is NaN."""
        _, layout, _ = self.layouts
        for tile in values:
            value = plgpu.load(tile, layout=layout)
            place = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=layout)
            tile[...] = jnp.where(place < left, value, jnp.zeros_like(value))

    def add(self, sums: jax.Array, weights, values) -> jax.Array:
        """Adds a block's weighted values, of one tile's columns."""
        left, right, _ = self.layouts
        count, _, width = weights.shape
        for tile in range(count):
            weight = plgpu.load(weights.at[tile], layout=left)
            value = plgpu.load(values.at[pl.ds(tile * width, width)], layout=right)
            sums = mosaic_gpu.product(sums, weight, value, interpret=self.interpret)
        return sums

    def finish(self, running: _Running, held: _Held, output_ref, sums_ref, output) -> None:
        """Writes out what one part gives."""
        for tile, values in enumerate(running.values):
            mosaic_gpu.store(output.at[:, pl.ds(tile * self.width, self.width)], values)
        held.sums[0] = running.largest
        held.sums[1] = running.total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(output.at[pl.ds(0, self.group)], output_ref)
        plgpu.copy_smem_to_gmem(held.sums, sums_ref)
        plgpu.wait_smem_to_gmem(0)
