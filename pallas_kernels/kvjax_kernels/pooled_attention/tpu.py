"""Pallas for TPU: two passes over each KV head's keys, first for the log-sum-exps, then for the votes."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kvjax_kernels.blocks import pad_to
from kvjax_kernels.masking import MASKED
from kvjax_kernels.pooled_attention.voting import pooled, seen_tokens, voters
from kvjax_kernels.tpu_layout import LANES, SUBLANES, interpreter, round_up

# A tile of scores, [R, block] float32 for R = G * W rows, is held a few times over in 16 MiB of VMEM.
_TILE_BYTES = 2 * 2**20
_MOST_ROWS = 1024


def unsupported_reason(
    query: Float[Array, "B W N D"], kv: Float[Array, "B K S twoD"], *_: Any, **__: Any
) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    for dtype in (query.dtype, kv.dtype):
        if dtype not in (jnp.float32, jnp.bfloat16):
            return f"it takes float32 and bfloat16, not {dtype}"
    rows = query.shape[2] // kv.shape[1] * round_up(query.shape[1], SUBLANES)
    if rows > _MOST_ROWS:
        return f"at most {_MOST_ROWS} queries of a group may vote, window in eights times heads, not {rows}"
    return None


def run(
    query: Float[Array, "B W N D"],
    kv: Float[Array, "B K S twoD"],
    query_positions: Int[Array, "B W"],
    key_positions: Int[Array, "B K S"],
    *,
    excluded: int,
    kernel: int,
    pooling: Literal["max", "avg"],
    group_reduce: Literal["mean", "max"],
    reduce: Literal["before_pooling", "after_pooling"],
    interpret: bool = False,
) -> Float[Array, "B K S"]:
    """See `api.pooled_attention`. Pooling, over scores only, is left to XLA."""
    group = query.shape[2] // kv.shape[1]
    # A mean of averages is an average of means.
    apart = reduce == "after_pooling" and not (pooling == "avg" and group_reduce == "mean")
    votes = _votes(
        query,
        kv,
        seen_tokens(query_positions, key_positions),
        (key_positions >= 0).sum(-1, dtype=jnp.int32),
        over_group="none" if apart else group_reduce,
        interpret=interpret,
    )
    attention = votes / voters(query_positions)[:, None, None, None]
    if not apart and group_reduce == "mean":
        attention = attention / group
    return pooled(
        attention, key_positions, excluded=excluded, kernel=kernel, pooling=pooling, group_reduce=group_reduce
    )


def _votes(
    query: Float[Array, "B W N D"],
    kv: Float[Array, "B K S twoD"],
    seen: Int[Array, "B K W"],
    lengths: Int[Array, "B K"],
    *,
    over_group: Literal["mean", "max", "none"],
    interpret: bool,
) -> Float[Array, "B K R S"]:
    """Probabilities summed over the queries; "mean" sums over the group too, "none" keeps its heads apart."""
    batch, window, query_heads, head_dim = query.shape
    kv_heads, slots = kv.shape[1:3]
    group = query_heads // kv_heads
    # Where a group's heads are told apart each starts a sublane tile of its own.
    height = window if over_group == "mean" else round_up(window, SUBLANES)
    rows = round_up(group * height, SUBLANES)
    block = _block(rows, slots)
    results = group if over_group == "none" else 1

    queries = query.reshape(batch, window, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    queries = pad_to(queries, 3, height, fill=0).reshape(batch, kv_heads, group * height, head_dim)
    queries = pad_to(queries, 2, rows, fill=0)
    seen = jnp.broadcast_to(seen[:, :, None], (batch, kv_heads, group, window))
    seen = pad_to(pad_to(seen, 3, height, fill=0).reshape(batch, kv_heads, 1, group * height), 3, rows, fill=0)
    # Head sizes that fill lanes need not load the values.
    loaded = head_dim if head_dim % LANES == 0 else kv.shape[3]

    def rows_of(row, head, phase, step, lengths_ref):
        del phase
        return row, head, loaded_block(step, lengths_ref[row, head], block), 0

    votes = pl.pallas_call(
        functools.partial(_votes_kernel, over_group=over_group, height=height, scale=head_dim**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, 2, pl.cdiv(slots, block)),
            in_specs=[
                pl.BlockSpec((None, None, 1, rows), lambda row, head, *_: (row, head, 0, 0)),
                pl.BlockSpec((None, None, rows, head_dim), lambda row, head, *_: (row, head, 0, 0)),
                pl.BlockSpec((None, None, block, loaded), rows_of),
            ],
            # The first phase writes nothing: it stays at the block that the second one begins with.
            out_specs=pl.BlockSpec(
                (None, None, results, block // LANES, LANES),
                lambda row, head, phase, step, _: (row, head, 0, step * phase, 0),
            ),
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.int32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, results, round_up(slots, block) // LANES, LANES), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        ),
        interpret=interpreter(interpret),
        name="pooled_attention",
    )(lengths, seen, queries, kv)
    return votes.reshape(batch, kv_heads, results, -1)[..., :slots]


def _votes_kernel(
    length_ref,
    seen_ref,
    query_ref,
    kv_ref,
    votes_ref,
    limit_ref,
    largest_ref,
    sum_ref,
    *,
    over_group: Literal["mean", "max", "none"],
    height: int,
    scale: float,
):
    """One block of one head's keys, in one of the two phases.

    `limit_ref` [R, 128] holds each row's number of seen tokens in all lanes. In the first phase every lane has a
    softmax of its own, of each 128th token: lanes meet once, at the end, when `largest_ref` takes the log-sum-exps.
    """
    row, head, phase, step = (pl.program_id(axis) for axis in range(4))
    rows, head_dim = query_ref.shape
    block = kv_ref.shape[0]
    holds_tokens = step * block < length_ref[row, head]

    def scores(chunk: int) -> jax.Array:
        query, key = query_ref[...], kv_ref[pl.ds(chunk * LANES, LANES), pl.ds(0, head_dim)]
        if query.dtype != key.dtype:
            query, key = query.astype(jnp.float32), key.astype(jnp.float32)
        products = jax.lax.dot_general(
            query,
            key,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if key.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        slots = step * block + chunk * LANES + jax.lax.broadcasted_iota(jnp.int32, products.shape, 1)
        return jnp.where(slots < limit_ref[...], products * scale, MASKED)

    chunks = range(block // LANES)

    @pl.when((phase == 0) & (step == 0))
    def _():
        limit_ref[...] = jnp.broadcast_to(seen_ref[...], (LANES, rows)).T
        largest_ref[...] = jnp.full_like(largest_ref, MASKED)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when((phase == 0) & holds_tokens)
    def _():
        tile = [scores(chunk) for chunk in chunks]
        before = largest_ref[...]
        largest = functools.reduce(jnp.maximum, tile, before)
        added = functools.reduce(jnp.add, [jnp.exp(part - largest) for part in tile])
        largest_ref[...] = largest
        sum_ref[...] = sum_ref[...] * jnp.exp(before - largest) + added

    @pl.when((phase == 0) & (step == pl.num_programs(3) - 1))
    def _():
        largest = largest_ref[...].max(axis=1, keepdims=True)
        total = (sum_ref[...] * jnp.exp(largest_ref[...] - largest)).sum(axis=1, keepdims=True)
        # A query that sees nothing gives nothing: exp(MASKED + MASKED) = 0.
        log_sum_exp = jnp.where(largest > MASKED, largest + jnp.log(jnp.maximum(total, 1.0)), -MASKED)
        largest_ref[...] = jnp.broadcast_to(log_sum_exp, (rows, LANES))

    @pl.when((phase == 1) & holds_tokens)
    def _():
        for chunk in chunks:
            given = jnp.exp(scores(chunk) - largest_ref[...])
            if over_group == "mean":
                votes_ref[0, chunk] = given.sum(axis=0)
                continue
            heads = [given[start : start + height].sum(axis=0) for start in range(0, rows, height)]
            if over_group == "max":
                votes_ref[0, chunk] = functools.reduce(jnp.maximum, heads)
            else:
                for place, votes in enumerate(heads):
                    votes_ref[place, chunk] = votes

    @pl.when((phase == 1) & ~holds_tokens)
    def _():
        votes_ref[...] = jnp.zeros_like(votes_ref)


def loaded_block(step: jax.Array | int, length: jax.Array | int, block: int) -> jax.Array:
    """The block of keys that a step of either phase works on, of a head with `length` tokens.

    Steps past the last block that holds a token have that one again, and load nothing.
    """
    return jnp.minimum(step, jnp.maximum(pl.cdiv(length, block) - 1, 0))


def _block(rows: int, slots: int) -> int:
    """Tokens of a block: 1,024 or twice as many, so that a block of votes is whole tiles; fewer where all fit."""
    block = 2048 if rows * 2048 * 4 <= _TILE_BYTES else 1024
    return min(block, round_up(slots, LANES))
