"""The TPU kernel: a tile of scores at a time, keys down the sublanes and queries along the lanes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import pad_to
from kvjax_kernels.column_sums.tiles import NOWHERE, visible_tiles
from kvjax_kernels.tpu_layout import LANES, interpreter, round_up

_KEY_BLOCK = 1024
# Queries of a group's heads in one tile: with the next tile on its way they take a quarter of 16 MiB of VMEM.
_QUERY_BYTES = 2 * 2**20
# Scalars that fit in SMEM, with room to spare.
_MOST_BLOCKS = 2**17


def unsupported_reason(
    query: Float[Array, "B T N D"], kv: Float[Array, "B K S twoD"], *_: Any, **__: Any
) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it takes float32 and bfloat16, got {query.dtype}"
    batch, kv_heads, slots = kv.shape[:3]
    blocks = batch * kv_heads * pl.cdiv(slots, _KEY_BLOCK)
    if blocks > _MOST_BLOCKS:
        return f"{blocks} blocks of keys exceed the {_MOST_BLOCKS} whose bounds fit in scalar memory"
    return None


def run(
    query: Float[Array, "B T N D"],
    kv: Float[Array, "B K S twoD"],
    log_sum_exp: Float[Array, "B N T"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B K S"],
    *,
    query_block: int | None = None,
    key_block: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B K S"]:
    """See `api.column_sums`.

    Args:
        query: see there.
        kv: see there; where D is a multiple of 128 only the key half of a row is loaded.
        log_sum_exp: see there.
        query_positions: see there.
        key_positions: see there.
        query_block: queries of each head in a tile, a multiple of 128.
        key_block: keys of a tile, a multiple of 128.
        interpret: whether to run in the interpreter.
    """
    batch, length, query_heads, head_dim = query.shape
    kv_heads, slots = key_positions.shape[1:]
    group = query_heads // kv_heads
    query_block = query_block or _query_block(length, group * head_dim * query.dtype.itemsize)
    key_block = key_block or min(_KEY_BLOCK, round_up(slots, LANES))
    log_sum_exp = pad_to(log_sum_exp, 2, query_block, fill=0)
    places = pad_to(query_positions.astype(jnp.int32), 1, query_block, fill=-1)
    # An empty slot stands past every query: one comparison masks all.
    columns = jnp.where(key_positions >= 0, key_positions, NOWHERE).astype(jnp.int32)
    columns = pad_to(columns, 2, key_block, fill=NOWHERE)
    tiles = visible_tiles(places, columns, query_block=query_block, key_block=key_block)
    query_blocks, key_blocks = places.shape[1] // query_block, columns.shape[2] // key_block

    def query_index(b, k, j, i, first, last, last_keys):
        # Tiles that nobody sees repeat a neighbour's index, which loads nothing.
        del last_keys
        start = first[(b * kv_heads + k) * key_blocks + j]
        return jnp.clip(i, jnp.minimum(start, query_blocks - 1), jnp.maximum(last[b], 0))

    def key_index(b, k, j, i, first, last, last_keys):
        del i, first, last
        return jnp.minimum(j, last_keys[b * kv_heads + k])

    width = head_dim if head_dim % LANES == 0 else 2 * head_dim
    sums = pl.pallas_call(
        functools.partial(_kernel, kv_heads=kv_heads),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, kv_heads, key_blocks, query_blocks),
            in_specs=[
                pl.BlockSpec((None, group, query_block, head_dim), lambda b, k, *at: (b, k, query_index(b, k, *at), 0)),
                pl.BlockSpec((None, None, key_block, width), lambda b, k, *at: (b, k, key_index(b, k, *at), 0)),
                pl.BlockSpec((None, group, 1, query_block), lambda b, k, *at: (b, k, 0, query_index(b, k, *at))),
                pl.BlockSpec((None, 1, query_block), lambda b, k, *at: (b, 0, query_index(b, k, *at))),
                pl.BlockSpec((None, None, 1, key_block), lambda b, k, *at: (b, k, 0, key_index(b, k, *at))),
            ],
            out_specs=pl.BlockSpec((None, None, 1, key_block), lambda b, k, j, *_: (b, k, 0, j)),
            scratch_shapes=[
                pltpu.VMEM((key_block, LANES), jnp.float32),
                pltpu.VMEM((key_block, LANES), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, 1, columns.shape[2]), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpreter(interpret),
        name="column_sums",
    )(
        tiles.first.reshape(-1),
        tiles.last,
        tiles.last_keys.reshape(-1),
        query.swapaxes(1, 2),
        kv,
        log_sum_exp[:, :, None],
        places[:, None],
        columns[:, :, None],
    )
    return sums[:, :, 0, :slots]


def _query_block(length: int, bytes_of_group: int) -> int:
    """Whole lanes of queries, not many more than there are."""
    lanes = max(1, min(_QUERY_BYTES // (bytes_of_group * LANES), 4))
    return LANES * min(lanes, pl.cdiv(length, LANES))


def _kernel(
    first, last, last_keys, query_ref, kv_ref, log_sum_exp_ref, places_ref, columns_ref, out_ref, sums_ref, turned_ref,
    *, kv_heads,
):  # fmt: skip
    del last_keys
    b, k, j, i = (pl.program_id(axis) for axis in range(4))
    group, query_block, head_dim = query_ref.shape
    key_block = turned_ref.shape[0]
    precision = jax.lax.Precision.HIGHEST if query_ref.dtype == jnp.float32 else None

    @pl.when(i == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        turned_ref[...] = jnp.broadcast_to(columns_ref[...], (LANES, key_block)).T

    @pl.when((i >= first[(b * kv_heads + k) * pl.num_programs(2) + j]) & (i <= last[b]))
    def _():
        columns = turned_ref[...]
        keys = kv_ref[:, :head_dim]

        def add_head(head, _):
            total = jnp.zeros_like(sums_ref)
            for start in range(0, query_block, LANES):
                lanes = pl.ds(start, LANES)
                # Scaled and rounded as prefill attention does: the log-sum-exps are of these scores.
                queries = query_ref[head, lanes, :].astype(jnp.float32) * head_dim**-0.5
                scores = jax.lax.dot_general(
                    keys,
                    queries.astype(keys.dtype),
                    (((1,), (1,)), ((), ())),
                    precision=precision,
                    preferred_element_type=jnp.float32,
                )
                probabilities = jnp.exp(scores - log_sum_exp_ref[head, :, lanes])
                total += jnp.where(columns <= places_ref[:, lanes], probabilities, 0.0)
            sums_ref[...] += total
            return 0

        jax.lax.fori_loop(0, group, add_head, 0)

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        out_ref[...] = sums_ref[...].T.sum(0, keepdims=True)
