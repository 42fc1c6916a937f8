"""The GPU kernel: a tile of a head's rows is fetched while the tile before is stored."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax_kernels.compact import gpu
from kvjax_kernels.compact.gpu import TILE, divisor, records
from kvjax_kernels.compact_in_place.paths import paths_of
from kvjax_kernels.mosaic_gpu import interpreter

# Columns of a row that one thread block moves in place, where the order of a head's tiles leaves no other blocks.
_COLUMNS_IN_PLACE = 128


def unsupported_reason(
    pages: Float[Array, "P R W"], table: Int[Array, "H N"], source: Int[Array, "H C"], *, interpret: bool
) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    del table
    return gpu.unsupported_reason(pages, source, interpret=interpret)


def run(
    pages: Float[Array, "P R W"], table: Int[Array, "H N"], source: Int[Array, "H C"], *, interpret: bool = False
) -> Float[Array, "P R W"]:
    """See `api.compact_in_place`; a thread block walks over the tiles of one head, some columns of it."""
    number, size, width = pages.shape
    columns = divisor(width, _COLUMNS_IN_PLACE, pages.dtype)
    # What lies together of a tile's slots, whatever the size of a page.
    chunk = math.gcd(TILE, size)
    paths = paths_of(table, source, size=size, tile=TILE, chunk=chunk)
    heads, tiles = paths.moves.shape
    tile_records = records(paths.source, paths.moves[..., None], paths.targets)

    def kernel(records_ref, rows_ref, records_s, rows_s, records_barriers, rows_barriers):
        h, part = lax.axis_index("h"), lax.axis_index("part")
        here = pl.ds(part * columns, columns)

        def fetch_record(i):
            slot = lax.rem(i, 2)
            plgpu.copy_gmem_to_smem(records_ref.at[h, i], records_s.at[slot], records_barriers.at[slot])

        def fetch(i):
            slot = lax.rem(i, 2)
            plgpu.barrier_wait(records_barriers.at[slot])

            @pl.when(records_s[slot, TILE] > 0)
            def _():
                def one(j, _):
                    row = records_s[slot, j]
                    plgpu.copy_gmem_to_smem(rows_ref.at[row, here], rows_s.at[slot, j], rows_barriers.at[slot])

                lax.fori_loop(0, TILE, one, None)

        def move(i, _):
            slot = lax.rem(i, 2)

            # None of the next tile's rows lies where this tile is stored: they may come first.
            @pl.when(i + 1 < tiles)
            def _():
                fetch(i + 1)

            @pl.when(records_s[slot, TILE] > 0)
            def _():
                plgpu.barrier_wait(rows_barriers.at[slot])
                # Orders the copies to come after what the threads have waited for.
                plgpu.commit_smem()

                def one(j, _):
                    target = records_s[slot, TILE + 1 + j]

                    @pl.when(target >= 0)
                    def _():
                        together = rows_s.at[slot, pl.ds(j * chunk, chunk)]
                        plgpu.copy_smem_to_gmem(together, rows_ref.at[pl.ds(target, chunk), here])

                lax.fori_loop(0, TILE // chunk, one, None)
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
            plgpu.SMEM((2, tile_records.shape[2]), jnp.int32),
            plgpu.SMEM((2, TILE, columns), pages.dtype),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2, num_arrivals=TILE),
        ],
        interpret=interpreter(interpret),
    )(tile_records, rows)
    return jax.freeze(rows).reshape(pages.shape)
