"""The GPU kernels: rows are copied to shared memory one by one, all of a tile in flight, and stored together."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import pad_to
from kvjax_kernels.compact.paths import paths_of
from kvjax_kernels.devices import missing_nvidia_gpu
from kvjax_kernels.mosaic_gpu import OLDEST, interpreter

_TILE = 64
# Columns that one copy may have.
_COLUMNS = 256
# Columns of a row that one thread block moves in place, where the order of a head's tiles leaves no other blocks.
_COLUMNS_IN_PLACE = 128
# Where a copy may start in shared memory: multiples of so many bytes.
_ALIGNMENT = 128


def obstacle(rows: Float[Array, "A M W"], source: Int[Array, "B C"], *, interpret: bool = False) -> str | None:
    """Why the kernels cannot compact `rows`, or pages, or None if they can."""
    if source.shape[1] == 0:
        return "there are no rows to move"
    size = rows.shape[2] * rows.dtype.itemsize
    if size % _ALIGNMENT:
        return f"rows must be a multiple of {_ALIGNMENT} bytes, got {size}"
    return None if interpret else missing_nvidia_gpu(rows, least=OLDEST)


def compact(
    rows: Float[Array, "B M W"], source: Int[Array, "B C"], *, interpret: bool = False
) -> Float[Array, "B C W"]:
    """See `api.compact`."""
    batch, count = source.shape
    width = rows.shape[2]
    columns = _divisor(width, _COLUMNS, rows.dtype)
    sources = pad_to(source.astype(jnp.int32), 1, _TILE, fill=-1).reshape(batch, -1, _TILE)
    tiles = sources.shape[1]
    rest = count - (tiles - 1) * _TILE
    gaps = (sources < 0).any(-1).astype(jnp.int32)
    sources = _records(sources, gaps[..., None])

    def kernel(sources_ref, rows_ref, out_ref, sources_s, rows_s, sources_barrier, rows_barrier):
        b, i, part = lax.axis_index("b"), lax.axis_index("i"), lax.axis_index("part")
        here = pl.ds(part * columns, columns)
        plgpu.copy_gmem_to_smem(sources_ref.at[b, i], sources_s, sources_barrier)
        plgpu.barrier_wait(sources_barrier)

        @pl.when(sources_s[_TILE] > 0)
        def _():
            rows_s[...] = jnp.zeros_like(rows_s)
            plgpu.commit_smem()

        def fetch(j, _):
            row = sources_s[j]

            @pl.when(row >= 0)
            def _():
                plgpu.copy_gmem_to_smem(rows_ref.at[b, row, here], rows_s.at[j], rows_barrier)

            @pl.when(row < 0)
            def _():
                plgpu.barrier_arrive(rows_barrier)

        lax.fori_loop(0, _TILE, fetch, None)
        plgpu.barrier_wait(rows_barrier)

        def store(length):
            plgpu.copy_smem_to_gmem(rows_s.at[pl.ds(0, length)], out_ref.at[b, pl.ds(i * _TILE, length), here])

        pl.when(i < tiles - 1)(lambda: store(_TILE))
        pl.when(i == tiles - 1)(lambda: store(rest))
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, count, width), rows.dtype),
        grid=(batch, tiles, width // columns),
        grid_names=("b", "i", "part"),
        scratch_types=[
            plgpu.SMEM(sources.shape[2:], jnp.int32),
            plgpu.SMEM((_TILE, columns), rows.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=_TILE),
        ],
        interpret=interpreter(interpret),
    )(sources, rows)


def compact_in_place(
    pages: Float[Array, "P R W"], table: Int[Array, "H N"], source: Int[Array, "H C"], *, interpret: bool = False
) -> Float[Array, "P R W"]:
    """See `api.compact_in_place`; a thread block walks over the tiles of one head, some columns of it."""
    number, size, width = pages.shape
    columns = _divisor(width, _COLUMNS_IN_PLACE, pages.dtype)
    # What lies together of a tile's slots, whatever the size of a page.
    chunk = math.gcd(_TILE, size)
    paths = paths_of(table, source, size=size, tile=_TILE, chunk=chunk)
    heads, tiles = paths.moves.shape
    records = _records(paths.source, paths.moves[..., None], paths.targets)

    def kernel(records_ref, rows_ref, records_s, rows_s, records_barriers, rows_barriers):
        h, part = lax.axis_index("h"), lax.axis_index("part")
        here = pl.ds(part * columns, columns)

        def fetch_record(i):
            slot = lax.rem(i, 2)
            plgpu.copy_gmem_to_smem(records_ref.at[h, i], records_s.at[slot], records_barriers.at[slot])

        def fetch(i):
            slot = lax.rem(i, 2)
            plgpu.barrier_wait(records_barriers.at[slot])

            @pl.when(records_s[slot, _TILE] > 0)
            def _():
                def one(j, _):
                    row = records_s[slot, j]
                    plgpu.copy_gmem_to_smem(rows_ref.at[row, here], rows_s.at[slot, j], rows_barriers.at[slot])

                lax.fori_loop(0, _TILE, one, None)

        def move(i, _):
            slot = lax.rem(i, 2)

            # None of the next tile's rows lies where this tile is stored: they may come first.
            @pl.when(i + 1 < tiles)
            def _():
                fetch(i + 1)

            @pl.when(records_s[slot, _TILE] > 0)
            def _():
                plgpu.barrier_wait(rows_barriers.at[slot])
                # Orders the copies to come after what the threads have waited for.
                plgpu.commit_smem()

                def one(j, _):
                    target = records_s[slot, _TILE + 1 + j]

                    @pl.when(target >= 0)
                    def _():
                        together = rows_s.at[slot, pl.ds(j * chunk, chunk)]
                        plgpu.copy_smem_to_gmem(together, rows_ref.at[pl.ds(target, chunk), here])

                lax.fori_loop(0, _TILE // chunk, one, None)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(i + 2 < tiles)
            def _():
                # All threads have read the record that is overwritten.
                plgpu.commit_smem()
                fetch_record(i + 2)

        fetch_record(0)

        @pl.when(tiles > 1)
        def _():
            fetch_record(1)

        fetch(0)
        lax.fori_loop(0, tiles, move, None)
        plgpu.wait_smem_to_gmem(0)

    rows = jax.new_ref(pages.reshape(number * size, width))
    plgpu.kernel(
        kernel,
        grid=(heads, width // columns),
        grid_names=("h", "part"),
        scratch_types=[
            plgpu.SMEM((2, records.shape[2]), jnp.int32),
            plgpu.SMEM((2, _TILE, columns), pages.dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2, num_arrivals=_TILE),
        ],
        interpret=interpreter(interpret),
    )(records, rows)
    return jax.freeze(rows).reshape(pages.shape)


def _divisor(width: int, most: int, dtype: jax.typing.DTypeLike) -> int:
    """The most columns that divide the row, and whose rows lie aligned one after another."""
    step = _ALIGNMENT // jnp.dtype(dtype).itemsize
    return next(columns for columns in range(most // step * step, 0, -step) if width % columns == 0)


def _records(*parts: Int[Array, "B tiles _"]) -> Int[Array, "B tiles length"]:
    """What a tile needs to know, side by side, filled up so that one lies aligned after another."""
    return pad_to(jnp.concatenate(parts, axis=-1), 2, _ALIGNMENT // 4, fill=0)
