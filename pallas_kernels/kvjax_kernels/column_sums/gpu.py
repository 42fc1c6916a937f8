"""The GPU kernel, for Hopper: a block of threads for each block of keys, past which the queries flow.

Scores stand with a key to a row and a query to a column, so that a key's sum stays in the registers of its threads.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax_kernels import mosaic_gpu
from kvjax_kernels.blocks import pad_to
from kvjax_kernels.column_sums.tiles import NOWHERE, visible_tiles
from kvjax_kernels.devices import missing_nvidia_gpu

# Rows of an accumulator of one group of four warps.
_ROWS = 64
# Keys of a block of threads: two accumulators' rows share every tile of queries.
_KEYS = 2 * _ROWS
_STAGES = 2
# Rows of a tile in shared memory.
_TILE_ROWS = 8
_LAYOUT = plgpu.Layout.WGMMA


def unsupported_reason(query: Float[Array, "B T N D"], *_: Any, interpret: bool) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    # The products of four warps together are an instruction of this generation alone.
    missing = None if interpret else missing_nvidia_gpu(query, least=mosaic_gpu.OLDEST, only=True)
    return mosaic_gpu.unsupported_heads(query.dtype, query.shape[3], interpret=interpret) or missing


def run(
    query: Float[Array, "B T N D"],
    kv: Float[Array, "B K S twoD"],
    log_sum_exp: Float[Array, "B N T"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
    *,
    interpret: bool = False,
) -> Float[Array, "B K S"]:
    """See `api.column_sums`; of a row only the key half is loaded."""
    batch, _, query_heads, head_dim = query.shape
    kv_heads, slots = key_positions.shape[1:]
    group = query_heads // kv_heads
    # Larger heads leave shared memory for fewer queries.
    block = 128 if head_dim <= 128 else 64
    width = mosaic_gpu.tile_width(head_dim, query.dtype)
    tiled = mosaic_gpu.tile(width, query.dtype, rows=_TILE_ROWS)
    # Powers of two are cheaper than of e.
    scale = head_dim**-0.5 * math.log2(math.e)
    # A tile of eight rows must not reach past the end: other lengths are copied, which is little beside the products.
    query, kv = pad_to(query, 1, _TILE_ROWS, fill=0), pad_to(kv, 2, _TILE_ROWS, fill=0)
    log_sum_exp = pad_to(log_sum_exp * math.log2(math.e), 2, block, fill=0)
    places = pad_to(query_positions.astype(jnp.int32), 1, block, fill=-1)
    columns = jnp.where(key_positions >= 0, key_positions, NOWHERE).astype(jnp.int32)
    columns = pad_to(columns, 2, _KEYS, fill=NOWHERE)
    tiles = visible_tiles(places, columns, query_block=block, key_block=_KEYS)
    key_blocks = columns.shape[2] // _KEYS

    def kernel(
        query_ref, kv_ref, log_sum_exp_ref, places_ref, columns_ref, first_ref, last_ref, out_ref, keys_s, columns_s,
        sums_s, arrived,
    ):  # fmt: skip
        b, k, j = (lax.axis_index(name) for name in ("b", "k", "j"))
        here = pl.ds(j * _KEYS, _KEYS)
        plgpu.copy_gmem_to_smem(kv_ref.at[b, k, here, pl.ds(0, head_dim)], keys_s, arrived)
        plgpu.copy_gmem_to_smem(columns_ref.at[b, k, here], columns_s, arrived)
        first = first_ref[b, k, j]
        blocks = jnp.maximum(last_ref[b] + 1 - first, 0)
        plgpu.barrier_wait(arrived)

        def step(indices, query_s, log_sum_exp_s, places_s, sums):
            del indices
            row_layout, column_layout = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
            shape = (_ROWS, block)
            asking = plgpu.load(places_s.at[0], layout=column_layout)
            asking = plgpu.layout_cast(lax.broadcast_in_dim(asking, shape, [1]), _LAYOUT)
            log_sum_exps = plgpu.load(log_sum_exp_s.at[0], layout=column_layout)
            log_sum_exps = plgpu.layout_cast(lax.broadcast_in_dim(log_sum_exps, shape, [1]), _LAYOUT)
            added = []
            for half, total in enumerate(sums):
                rows = pl.ds(half * _ROWS, _ROWS)

                def multiply(scores_ref, rows=rows):
                    plgpu.wgmma(scores_ref, keys_s.at[rows], query_s.transpose((1, 0)))
                    return scores_ref[...]

                scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
                held = plgpu.load(columns_s.at[rows], layout=row_layout)
                held = plgpu.layout_cast(lax.broadcast_in_dim(held, shape, [0]), _LAYOUT)
                weights = jnp.where(held <= asking, jnp.exp2(scores * scale - log_sum_exps), 0.0)
                added.append(total + weights.sum(axis=1))
            # All threads have read what the next copy overwrites.
            plgpu.commit_smem()
            return tuple(added)

        def place(i):
            # A block's heads one after another: its positions stay where they are.
            return first + lax.div(i, group), k * group + lax.rem(i, group)

        start = tuple(mosaic_gpu.filled((_ROWS,), 0.0, _LAYOUT.reduce(1)) for _ in range(2))
        sums = plgpu.emit_pipeline(
            step,
            grid=(blocks * group,),
            in_specs=[
                plgpu.BlockSpec((block, head_dim), place, transforms=tiled),
                plgpu.BlockSpec((1, block), lambda i: place(i)[::-1]),
                plgpu.BlockSpec((1, block), lambda i: (b, place(i)[0])),
            ],
            max_concurrent_steps=_STAGES,
            init_carry=start,
        )(query_ref.at[b], log_sum_exp_ref.at[b], places_ref)
        for half, total in enumerate(sums):
            sums_s[pl.ds(half * _ROWS, _ROWS)] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums_s, out_ref.at[b, k, here])
        plgpu.wait_smem_to_gmem(0)

    sums = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(columns.shape, jnp.float32),
        grid=(batch, kv_heads, key_blocks),
        grid_names=("b", "k", "j"),
        scratch_types=[
            plgpu.SMEM((_KEYS, head_dim), query.dtype, transforms=tiled),
            plgpu.SMEM((_KEYS,), jnp.int32),
            plgpu.SMEM((_KEYS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=mosaic_gpu.interpreter(interpret),
    )(
        query.reshape(batch, -1, query_heads * head_dim),
        kv,
        log_sum_exp,
        places,
        columns,
        tiles.first,
        tiles.last,
    )
    return sums[:, :, :slots]
