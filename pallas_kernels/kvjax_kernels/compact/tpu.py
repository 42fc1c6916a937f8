"""The TPU kernel: a copy for each row, a tile of them in flight while the tile before is written.

A row of 16 bits cannot be copied alone: two rows share the 32-bit words of a sublane. So rows are copied in aligned
pairs, and the wanted half of each word is picked. Pairs for even destinations lie in the first half of the buffer, for
odd ones in the second, so that the two halves make the words of the tile.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import pad_to
from kvjax_kernels.tpu_layout import LANES, interpreter, round_up

#: Rows that are in flight at once.
TILE = 256
# Copies that are started between two tests of the loop's end.
_UNROLL = 8
# Tiles whose flags fit in SMEM, with room to spare.
_MOST_TILES = 2**17


def unsupported_reason(rows: Float[Array, "A M W"], source: Int[Array, "B C"], *, interpret: bool) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    del interpret
    if source.shape[1] == 0:
        return "there are no rows to move"
    if rows.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it takes float32 and bfloat16, got {rows.dtype}"
    if rows.shape[1] % _rows_per_copy(rows.dtype):
        return f"16-bit rows are copied in pairs, and {rows.shape[1]} rows are not whole pairs"
    tiles = source.shape[0] * pl.cdiv(source.shape[1], TILE)
    if tiles > _MOST_TILES:
        return f"{tiles} tiles of rows exceed the {_MOST_TILES} whose flags fit in scalar memory"
    return None


def run(
    rows: Float[Array, "B M W"], source: Int[Array, "B C"], *, tile: int = TILE, interpret: bool = False
) -> Float[Array, "B C W"]:
    """See `api.compact`; tiles that are to be zeros read no rows."""
    batch, count = source.shape
    width = rows.shape[2]
    tile = min(tile, round_up(count, LANES))
    source = pad_to(source.astype(jnp.int32), 1, tile, fill=-1).reshape(batch, -1, 1, tile)
    tiles = source.shape[1]
    filled = (source >= 0).any((2, 3)).astype(jnp.int32).reshape(-1)

    def kernel(filled, source_ref, following_ref, flags_ref, rows_ref, out_ref, buffer_ref, semaphores):
        b, i = pl.program_id(0), pl.program_id(1)
        fetch(filled, source_ref, following_ref, rows_ref.at[b], buffer_ref, semaphores)

        @pl.when(filled[b * tiles + i] == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        @pl.when(filled[b * tiles + i] > 0)
        def _():
            out_ref[...] = fetched(flags_ref, buffer_ref, semaphores)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, tiles),
            in_specs=[*source_specs(tile, tiles), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((None, tile, width), lambda b, i, filled: (b, i, 0)),
            scratch_shapes=buffers(tile, width, rows.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, count, width), rows.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpreter(interpret),
        name="compact",
    )(filled, *sources(source, rows.dtype), rows)


def _rows_per_copy(dtype: jax.typing.DTypeLike) -> int:
    """Rows that share a 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def buffers(tile: int, width: int, dtype: jax.typing.DTypeLike, *more: object) -> list:
    """Scratch memory: two tiles' rows or pairs, and a semaphore for each, and one more."""
    rows = pltpu.VMEM((2, tile * _rows_per_copy(dtype), width), dtype)
    return [rows, *more, pltpu.SemaphoreType.DMA((3,))]


def source_specs(tile: int, tiles: int) -> list[pl.BlockSpec]:
    """Of `sources`: a tile's and the next one's as scalars, and a tile's as a vector."""

    def this(b, i, flags):
        del flags
        return b, i, 0, 0

    def following(b, i, flags):
        del flags
        return b, jnp.minimum(i + 1, tiles - 1), 0, 0

    shape = (None, None, 1, tile)
    return [
        pl.BlockSpec(shape, this, memory_space=pltpu.SMEM),
        pl.BlockSpec(shape, following, memory_space=pltpu.SMEM),
        pl.BlockSpec(shape, this),
    ]


def sources(source: Int[Array, "B tiles 1 tile"], dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
    """Each row's source, for the scalars; and for the vector in the order in which the rows are picked."""
    picked = source
    if _rows_per_copy(dtype) == 2:
        picked = source.reshape(*source.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(source.shape)
    return source, source, picked


def fetch(flags, source_ref, following_ref, rows_ref, buffer_ref, semaphores) -> None:
    """Starts the copies of the next tile's rows, and in a row's first step those of the first tile."""
    b, i, tiles = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    tile = source_ref.shape[1]
    together = buffer_ref.shape[1] // tile

    def start(indices, slot):
        def one(j, _):
            row = jnp.maximum(indices[0, j], 0)
            place = j
            if together == 2:
                row, place = (row >> 1) << 1, (j & 1) * tile + (j >> 1) * 2
            pltpu.make_async_copy(
                rows_ref.at[pl.ds(pl.multiple_of(row, together), together)],
                buffer_ref.at[slot, pl.ds(pl.multiple_of(place, together), together)],
                semaphores.at[slot],
            ).start()
            return 0

        jax.lax.fori_loop(0, tile, one, 0, unroll=_UNROLL)

    @pl.when((i == 0) & (flags[b * tiles] > 0))
    def _():
        start(source_ref, 0)

    @pl.when((i + 1 < tiles) & (flags[b * tiles + jnp.minimum(i + 1, tiles - 1)] > 0))
    def _():
        start(following_ref, jax.lax.rem(i + 1, 2))


def fetched(flags_ref, buffer_ref, semaphores) -> Float[Array, "tile W"]:
    """Waits for a tile's rows; zeros where the source is negative."""
    tile = flags_ref.shape[1]
    slot = jax.lax.rem(pl.program_id(1), 2)
    # One wait for the bytes of all the copies.
    pltpu.make_async_copy(buffer_ref.at[1 - slot], buffer_ref.at[slot], semaphores.at[slot]).wait()
    # Along the lanes, turned to one a sublane.
    source = jnp.broadcast_to(flags_ref[...], (LANES, tile)).T[:, :1]
    rows = buffer_ref[slot]
    if rows.shape[0] == tile:
        return jnp.where(source >= 0, rows, jnp.zeros((), rows.dtype))
    words = pltpu.bitcast(rows, jnp.int32)
    halves = jnp.where((source & 1) == 1, jax.lax.shift_right_logical(words, 16), words & 0xFFFF)
    halves = jnp.where(source >= 0, halves, 0)
    return pltpu.bitcast(halves[: tile // 2] | (halves[tile // 2 :] << 16), rows.dtype)
