"""The TPU kernels: a copy for each row, a tile of them in flight while the tile before is written.

A row of 16 bits cannot be copied alone: two rows share the 32-bit words of a sublane. So rows are copied in aligned
pairs, and the wanted half of each word is picked. Pairs for even destinations lie in the first half of the buffer, for
odd ones in the second, so that the two halves make the words of the tile.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import pad_to
from kvjax_kernels.compact.paths import Paths, paths_of

_TILE = 256
_LANES = 128
_SUBLANES = 8
# Copies that are started between two tests of the loop's end.
_UNROLL = 8
# Tiles whose flags fit in SMEM, with room to spare.
_MOST_TILES = 2**17


def obstacle(rows: Float[Array, "A M W"], source: Int[Array, "B C"]) -> str | None:
    """Why the kernel cannot compact `rows`, or pages, or None if it can."""
    if source.shape[1] == 0:
        return "there are no rows to move"
    if rows.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it takes float32 and bfloat16, got {rows.dtype}"
    if rows.shape[1] % _rows_per_copy(rows.dtype):
        return f"16-bit rows are copied in pairs, and {rows.shape[1]} rows are not whole pairs"
    tiles = source.shape[0] * pl.cdiv(source.shape[1], _TILE)
    if tiles > _MOST_TILES:
        return f"{tiles} tiles of rows exceed the {_MOST_TILES} whose flags fit in scalar memory"
    return None


def obstacle_in_place(pages: Float[Array, "P R W"], source: Int[Array, "H C"]) -> str | None:
    """Why the kernel cannot compact `pages` in place, or None if it can."""
    if pages.shape[1] % _SUBLANES:
        return f"pages must have a multiple of {_SUBLANES} slots, got {pages.shape[1]}"
    return obstacle(pages, source)


def compact(
    rows: Float[Array, "B M W"], source: Int[Array, "B C"], *, tile: int = _TILE, interpret: bool = False
) -> Float[Array, "B C W"]:
    """See `api.compact`; tiles that are to be zeros read no rows."""
    batch, count = source.shape
    width = rows.shape[2]
    tile = min(tile, pl.cdiv(count, _LANES) * _LANES)
    source = pad_to(source.astype(jnp.int32), 1, tile, fill=-1).reshape(batch, -1, 1, tile)
    tiles = source.shape[1]
    filled = (source >= 0).any((2, 3)).astype(jnp.int32).reshape(-1)

    def kernel(filled, source_ref, following_ref, flags_ref, rows_ref, out_ref, buffer_ref, semaphores):
        b, i = pl.program_id(0), pl.program_id(1)
        _fetch(filled, source_ref, following_ref, rows_ref.at[b], buffer_ref, semaphores)

        @pl.when(filled[b * tiles + i] == 0)
        def _():
            out_ref[...] = jnp.zeros_like(out_ref)

        @pl.when(filled[b * tiles + i] > 0)
        def _():
            out_ref[...] = _fetched(flags_ref, buffer_ref, semaphores)

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, tiles),
            in_specs=[*_source_specs(tile, tiles), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((None, tile, width), lambda b, i, filled: (b, i, 0)),
            scratch_shapes=_buffers(tile, width, rows.dtype),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, count, width), rows.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=_interpreter(interpret),
        name="compact",
    )(filled, *_sources(source, rows.dtype), rows)


def compact_in_place(
    pages: Float[Array, "P R W"],
    table: Int[Array, "H N"],
    source: Int[Array, "H C"],
    *,
    tile: int = _TILE,
    interpret: bool = False,
) -> Float[Array, "P R W"]:
    """See `api.compact_in_place`; chunks of slots that keep what they hold are neither read nor written."""
    number, size, width = pages.shape
    heads, count = source.shape
    tile = min(tile, pl.cdiv(count, _LANES) * _LANES)
    # What lies together of a tile's slots, whatever the size of a page.
    chunk = math.gcd(tile, size)
    paths: Paths = paths_of(table, source, size=size, tile=tile, chunk=chunk)
    tiles = paths.source.shape[1]

    def kernel(moves, source_ref, following_ref, flags_ref, targets_ref, _, rows_ref, buffer_ref, tile_ref, semaphores):
        h, i = pl.program_id(0), pl.program_id(1)
        _fetch(moves, source_ref, following_ref, rows_ref, buffer_ref, semaphores)

        def chunks(act):
            def one(index, _):
                target = targets_ref[0, index]

                @pl.when(target >= 0)
                def _():
                    here = tile_ref.at[pl.ds(pl.multiple_of(index * chunk, chunk), chunk)]
                    there = rows_ref.at[pl.ds(pl.multiple_of(target, chunk), chunk)]
                    act(pltpu.make_async_copy(here, there, semaphores.at[2]))

                return 0

            jax.lax.fori_loop(0, tile // chunk, one, 0)

        @pl.when(moves[h * tiles + i] > 0)
        def _():
            tile_ref[...] = _fetched(flags_ref, buffer_ref, semaphores)
            chunks(lambda copy: copy.start())
            # The next tile's rows are on their way meanwhile: none of them lies where this tile is written.
            chunks(lambda copy: copy.wait())

    rows = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(heads, tiles),
            in_specs=[
                *_source_specs(tile, tiles),
                pl.BlockSpec((None, None, 1, tile // chunk), lambda h, i, moves: (h, i, 0, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=_buffers(tile, width, pages.dtype, pltpu.VMEM((tile, width), pages.dtype)),
        ),
        out_shape=jax.ShapeDtypeStruct((number * size, width), pages.dtype),
        input_output_aliases={5: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), has_side_effects=True),
        interpret=_interpreter(interpret),
        name="compact_in_place",
    )(
        paths.moves.reshape(-1),
        *_sources(paths.source[:, :, None], pages.dtype),
        paths.targets[:, :, None],
        pages.reshape(number * size, width),
    )
    return rows.reshape(pages.shape)


def _rows_per_copy(dtype: jax.typing.DTypeLike) -> int:
    """Rows that share a 32-bit word."""
    return 4 // jnp.dtype(dtype).itemsize


def _interpreter(interpret: bool) -> pltpu.InterpretParams | bool:
    return pltpu.InterpretParams(detect_races=True) if interpret else False


def _buffers(tile: int, width: int, dtype: jax.typing.DTypeLike, *more: object) -> list:
    """Scratch memory: two tiles' rows or pairs, and a semaphore for each, and one more."""
    rows = pltpu.VMEM((2, tile * _rows_per_copy(dtype), width), dtype)
    return [rows, *more, pltpu.SemaphoreType.DMA((3,))]


def _source_specs(tile: int, tiles: int) -> list[pl.BlockSpec]:
    """Of `_sources`: a tile's and the next one's as scalars, and a tile's as a vector."""

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


def _sources(source: Int[Array, "B tiles 1 tile"], dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
    """Each row's source, for the scalars; and for the vector in the order in which the rows are picked."""
    picked = source
    if _rows_per_copy(dtype) == 2:
        picked = source.reshape(*source.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(source.shape)
    return source, source, picked


def _fetch(flags, source_ref, following_ref, rows_ref, buffer_ref, semaphores) -> None:
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


def _fetched(flags_ref, buffer_ref, semaphores) -> Float[Array, "tile W"]:
    """Waits for a tile's rows; zeros where the source is negative."""
    tile = flags_ref.shape[1]
    slot = jax.lax.rem(pl.program_id(1), 2)
    # One wait for the bytes of all the copies.
    pltpu.make_async_copy(buffer_ref.at[1 - slot], buffer_ref.at[slot], semaphores.at[slot]).wait()
    # Along the lanes, turned to one a sublane.
    source = jnp.broadcast_to(flags_ref[...], (_LANES, tile)).T[:, :1]
    rows = buffer_ref[slot]
    if rows.shape[0] == tile:
        return jnp.where(source >= 0, rows, jnp.zeros((), rows.dtype))
    words = pltpu.bitcast(rows, jnp.int32)
    halves = jnp.where((source & 1) == 1, jax.lax.shift_right_logical(words, 16), words & 0xFFFF)
    halves = jnp.where(source >= 0, halves, 0)
    return pltpu.bitcast(halves[: tile // 2] | (halves[tile // 2 :] << 16), rows.dtype)
