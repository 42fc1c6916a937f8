"""What the Mosaic GPU kernels share, and what differs between the versions of JAX that they run on."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kvjax_kernels.devices import device

#: The compute capability that Mosaic compiles for, or a newer one: it aborts the process on older GPUs.
OLDEST = (9, 0)

#: Rows that one product of the tensor cores takes at a time.
ROWS = 16

#: Columns of an accumulator that the four warps of a block of threads make at a time.
COLUMNS = 32

# Of an H100 or H200, where the device does not say (there is none when compiling ahead of time).
_PROCESSORS = 132


def processors() -> int:
    """Streaming multiprocessors of the device."""
    return getattr(device(), "core_count", None) or _PROCESSORS


def interpreter(interpret: bool) -> plgpu.InterpretGPUParams | None:
    """The `interpret` argument of `plgpu.kernel`: an interpreter that finds data races, or none."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else None


def tile_width(columns: int, dtype: jax.typing.DTypeLike) -> int:
    """Columns of the widest swizzled tile that so many are a multiple of; 0 if no tile fits."""
    itemsize = jnp.dtype(dtype).itemsize
    return next((size // itemsize for size in (128, 64) if columns % (size // itemsize) == 0), 0)


def tile(width: int, dtype: jax.typing.DTypeLike) -> tuple:
    """The layout in shared memory of arrays `width` columns wide, free of bank conflicts.

    A tile has one row, not the usual eight, so that a bulk copy may start at any row of an array of any length. Eight
    rows of an array one tile wide lie in memory just as a tile of eight does.
    """
    swizzle = width * jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((1, width)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """A constant float32 array in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def product(sums: jax.Array, left: jax.Array, right: jax.Array, *, interpret: bool) -> jax.Array:
    """`sums + left @ right` by the tensor cores, which sum in float32."""
    if interpret:  # The interpreter has no rule for `mma`.
        return sums + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(sums, left, right)


def store(ref: Any, value: jax.Array) -> None:
    """Stores an array whose layout in registers has no fast way to `ref`."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:  # jax 0.11
        ref[...] = value
