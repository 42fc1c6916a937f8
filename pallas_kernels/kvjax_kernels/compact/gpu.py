"""The GPU kernel: rows are copied to shared memory one by one, all of a tile in flight, and stored together."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import pad_to
from kvjax_kernels.devices import missing_nvidia_gpu
from kvjax_kernels.mosaic_gpu import OLDEST, interpreter

#: Rows that are in flight at once.
TILE = 64
# Columns that one copy may have.
_COLUMNS = 256
# Where a copy may start in shared memory: multiples of so many bytes.
_ALIGNMENT = 128


def unsupported_reason(rows: Float[Array, "A M W"], source: Int[Array, "B C"], *, interpret: bool) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    if source.shape[1] == 0:
        return "there are no rows to move"
    size = rows.shape[2] * rows.dtype.itemsize
    if size % _ALIGNMENT:
        return f"rows must be a multiple of {_ALIGNMENT} bytes, got {size}"
    return None if interpret else missing_nvidia_gpu(rows, least=OLDEST)


def run(rows: Float[Array, "B M W"], source: Int[Array, "B C"], *, interpret: bool = False) -> Float[Array, "B C W"]:
    """See `api.compact`."""
    batch, count = source.shape
    width = rows.shape[2]
    columns = divisor(width, _COLUMNS, rows.dtype)
    sources = pad_to(source.astype(jnp.int32), 1, TILE, fill=-1).reshape(batch, -1, TILE)
    tiles = sources.shape[1]
    rest = count - (tiles - 1) * TILE
    gaps = (sources < 0).any(-1).astype(jnp.int32)
    sources = records(sources, gaps[..., None])

    def kernel(sources_ref, rows_ref, out_ref, sources_s, rows_s, sources_barrier, rows_barrier):
        b, i, part = lax.axis_index("b"), lax.axis_index("i"), lax.axis_index("part")
        here = pl.ds(part * columns, columns)
        plgpu.copy_gmem_to_smem(sources_ref.at[b, i], sources_s, sources_barrier)
        plgpu.barrier_wait(sources_barrier)

        @pl.when(sources_s[TILE] > 0)
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

        lax.fori_loop(0, TILE, fetch, None)
        plgpu.barrier_wait(rows_barrier)

        def store(length):
            plgpu.copy_smem_to_gmem(rows_s.at[pl.ds(0, length)], out_ref.at[b, pl.ds(i * TILE, length), here])

        pl.when(i < tiles - 1)(lambda: store(TILE))
        pl.when(i == tiles - 1)(lambda: store(rest))
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, count, width), rows.dtype),
        grid=(batch, tiles, width // columns),
        grid_names=("b", "i", "part"),
        scratch_types=[
            plgpu.SMEM(sources.shape[2:], jnp.int32),
            plgpu.SMEM((TILE, columns), rows.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=TILE),
        ],
        interpret=interpreter(interpret),
    )(sources, rows)


def divisor(width: int, most: int, dtype: jax.typing.DTypeLike) -> int:
    """The most columns that divide the row, and whose rows lie aligned one after another."""
    step = _ALIGNMENT // jnp.dtype(dtype).itemsize
    return next(columns for columns in range(most // step * step, 0, -step) if width % columns == 0)


def records(*parts: Int[Array, "B tiles _"]) -> Int[Array, "B tiles length"]:
    """What a tile needs to know, side by side, filled up so that one lies aligned after another."""
    return pad_to(jnp.concatenate(parts, axis=-1), 2, _ALIGNMENT // 4, fill=0)
