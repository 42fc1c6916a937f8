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

# Blocks of tokens that make a part worth its own output.
_SHORTEST_PART = 4

# More query heads or a larger head spill out of the registers.
_LARGEST_GROUP, _LARGEST_HEAD = 32, 256


def processors() -> int:
    """Streaming multiprocessors of the device."""
    return getattr(device(), "core_count", None) or _PROCESSORS


def count_parts(heads: int, blocks: int, *, thread_blocks: int) -> int:
    """Parts of each of so many heads' tokens: enough to fill the chip, each of a few blocks or more.

    Args:
        heads: KV heads of all rows.
        blocks: blocks of tokens of the longest head.
        thread_blocks: blocks of threads for each multiprocessor.
    """
    wanted = -(-thread_blocks * processors() // heads)
    return max(1, min(wanted, blocks // _SHORTEST_PART))


def share(length: Any, part: Any, *, parts: int, block: int) -> tuple[Any, Any]:
    """A part's equal share of a head's blocks: the first of them, and how many."""
    blocks = (length + (block - 1)) // block
    first = part * blocks // parts
    return first, (part + 1) * blocks // parts - first


def unsupported_heads(dtype: Any, head_dim: int, *, group: int = 1, interpret: bool) -> str | None:
    """Why products of these heads cannot be computed; None if they can. Only the interpreter takes float32."""
    if dtype not in (jnp.bfloat16, jnp.float16) and not (interpret and dtype == jnp.float32):
        return f"the tensor cores take bfloat16 or float16, not {dtype}"
    if head_dim % COLUMNS or head_dim > _LARGEST_HEAD:
        return f"the head size must be a multiple of {COLUMNS} up to {_LARGEST_HEAD}, not {head_dim}"
    if group > _LARGEST_GROUP:
        return f"at most {_LARGEST_GROUP} query heads may share a KV head, not {group}"
    return None


def interpreter(interpret: bool) -> plgpu.InterpretGPUParams | None:
    """The `interpret` argument of `plgpu.kernel`: an interpreter that finds data races, or none."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else None


def tile_width(columns: int, dtype: jax.typing.DTypeLike) -> int:
    """Columns of the widest swizzled tile that so many are a multiple of; 0 if no tile fits."""
    itemsize = jnp.dtype(dtype).itemsize
    return next((size // itemsize for size in (128, 64) if columns % (size // itemsize) == 0), 0)


def tile(width: int, dtype: jax.typing.DTypeLike, *, rows: int = 1) -> tuple:
    """The layout in shared memory of arrays `width` columns wide, free of bank conflicts.

    Four warps together multiply from tiles of eight rows. Those of one row let a bulk copy start at any row of an
    array of any length; eight rows of an array one tile wide lie in memory just as a tile of eight does.
    """
    swizzle = width * jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((rows, width)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


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
