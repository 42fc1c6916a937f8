"""The GPU kernels of the votes, for Hopper: one pass over a head's keys for the log-sum-exps, one for the votes.

All queries of a group stay in shared memory, and blocks of keys flow past them. In the first pass a query is a row
of the tensor cores' products, in the second a key, so that sums run along rows, in the registers of a few threads.
"""

import dataclasses
import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kvjax_kernels import mosaic_gpu
from kvjax_kernels.blocks import pad_to
from kvjax_kernels.devices import missing_nvidia_gpu
from kvjax_kernels.masking import MASKED
from kvjax_kernels.pooled_attention.voting import pooled, seen_tokens, voters

# Rows of an accumulator of one group of four warps, and the most columns in the second pass.
_ROWS = 64
_STAGES = 2
# Elements along an axis that one copy may have.
_COPIED = 256
# Elements of the queries of a group, half of the shared memory; blocks of keys take a quarter.
_MOST_HELD = 64 * 1024
# Blocks of threads for each multiprocessor, of which one or two run at once.
_THREAD_BLOCKS = 4

_LAYOUT = plgpu.Layout.WGMMA
_GRID = ("row", "head", "part")


def unsupported_reason(
    query: Float[Array, "B W N D"], kv: Float[Array, "B K S twoD"], *_: Any, interpret: bool, **__: Any
) -> str | None:
    """Why the kernel cannot do this; None if it can."""
    window, head_dim, group = query.shape[1], query.shape[3], query.shape[2] // kv.shape[1]
    if reason := mosaic_gpu.unsupported_heads(kv.dtype, head_dim, group=group, interpret=interpret):
        return reason
    rows = group * _in_eights(window)
    most = _MOST_HELD // head_dim // _ROWS * _ROWS
    if rows > most:
        return f"at most {most} queries of a group may vote, window in eights times heads, not {rows}"
    # The products of four warps together are an instruction of this generation alone.
    return None if interpret else missing_nvidia_gpu(query, least=mosaic_gpu.OLDEST, only=True)


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
    """See `api.pooled_attention`. Pooling, over scores only, is left to XLA; of a row only the key is loaded."""
    (batch, window, query_heads, head_dim), (kv_heads, slots) = query.shape, kv.shape[1:3]
    group = query_heads // kv_heads
    # A mean of averages is an average of means.
    apart = reduce == "after_pooling" and not (pooling == "avg" and group_reduce == "mean")
    votes = _Votes(
        head_dim=head_dim,
        group=group,
        height=window if group_reduce == "mean" and not apart else _in_eights(window),
        over_group="none" if apart else group_reduce,
        dtype=kv.dtype,
        parts=mosaic_gpu.count_parts(batch * kv_heads, -(-slots // block_keys(head_dim)), thread_blocks=_THREAD_BLOCKS),
        interpret=interpret,
    )
    queries = query.astype(kv.dtype).reshape(batch, window, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    seen = jnp.broadcast_to(seen_tokens(query_positions, key_positions)[:, :, None], (batch, kv_heads, group, window))
    lengths = (key_positions >= 0).sum(-1, dtype=jnp.int32)
    attention = votes(votes.by_row(queries), kv, votes.by_row(seen), lengths)[..., :slots]
    attention = attention / voters(query_positions)[:, None, None, None]
    if votes.over_group == "mean":
        attention = attention / group
    return pooled(
        attention, key_positions, excluded=excluded, kernel=kernel, pooling=pooling, group_reduce=group_reduce
    )


def block_keys(head_dim: int) -> int:
    """Keys that are loaded and computed on at a time."""
    return _ROWS if head_dim > 128 else 2 * _ROWS


def _in_eights(window: int) -> int:
    """Rows of a query head that stands apart: a product takes columns by eight."""
    return -(-window // 8) * 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Votes:
    """The kernels' settings, and what one block of threads does in each of them.

    R rows are the queries of a group, query head by query head, `height` rows for each of them.

    Attributes:
        over_group: "mean" sums over the query heads, "none" keeps them apart.
    """

    head_dim: int
    group: int
    height: int
    over_group: Literal["mean", "max", "none"]
    dtype: Any
    parts: int
    interpret: bool

    @property
    def keys(self) -> int:
        """See `block_keys`."""
        return block_keys(self.head_dim)

    @property
    def rows(self) -> int:
        """R, in whole accumulators."""
        return -(-self.group * self.height // _ROWS) * _ROWS

    @property
    def results(self) -> int:
        """Sums of each token."""
        return self.group if self.over_group == "none" else 1

    @property
    def columns(self) -> int:
        """Columns of the second pass's products."""
        if self.over_group == "mean":
            return _ROWS
        return next(columns for columns in range(_ROWS, 0, -8) if self.height % columns == 0)

    @property
    def members(self) -> tuple[int, int]:
        """Sums that are told apart in the second pass, and the products of each."""
        if self.over_group == "mean":
            return 1, self.rows // self.columns
        return self.group, self.height // self.columns

    @property
    def copied(self) -> list[Any]:
        """The slices in which R rows are copied."""
        return [pl.ds(start, min(_COPIED, self.rows - start)) for start in range(0, self.rows, _COPIED)]

    @property
    def tiled(self) -> tuple:
        """The layout in shared memory that the tensor cores multiply from."""
        width = mosaic_gpu.tile_width(self.head_dim, self.dtype)
        return mosaic_gpu.tile(width, self.dtype, rows=8)

    def by_row(self, x: jax.Array) -> jax.Array:
        """[B, K, G, W, ...] as [B, K, R, ...], with zeros between and behind."""
        x = pad_to(x, 3, self.height, fill=0)
        return pad_to(x.reshape(*x.shape[:2], -1, *x.shape[4:]), 2, self.rows, fill=0)

    def __call__(
        self,
        queries: Float[Array, "B K R D"],
        kv: Float[Array, "B K S twoD"],
        seen: Int[Array, "B K R"],
        lengths: Int[Array, "B K"],
    ) -> Float[Array, "B K results S2"]:
        """The votes of whole blocks of tokens; those past a head's last one hold anything."""
        batch, kv_heads, slots = kv.shape[:3]
        grid = (batch, kv_heads, self.parts)
        if slots % 8:
            # Tiles for the tensor cores have eight rows, and so must have what they are copied from.
            kv = jnp.pad(kv[..., : self.head_dim], ((0, 0), (0, 0), (0, -slots % 8), (0, 0)))
        query_s = plgpu.SMEM((self.rows, self.head_dim), self.dtype, transforms=self.tiled)
        seen_s, number_s = (plgpu.SMEM((self.rows,), dtype) for dtype in (jnp.int32, jnp.float32))

        def over_grid(body: Any, out_shape: tuple[int, ...], scratch: list) -> Any:
            return plgpu.kernel(
                body,
                out_type=jax.ShapeDtypeStruct(out_shape, jnp.float32),
                grid=grid,
                grid_names=_GRID,
                scratch_types=scratch,
                compiler_params=plgpu.CompilerParams(approx_math=True),
                interpret=mosaic_gpu.interpreter(self.interpret),
                kernel_name="pooled_attention",
            )

        sums = over_grid(
            self.sum_part,
            (*grid, 2, self.rows),
            [
                query_s,
                seen_s,
                plgpu.SMEM((2, self.rows), jnp.float32),
                plgpu.Barrier(num_arrivals=2 * len(self.copied)),
            ],
        )(queries, kv, seen, lengths)
        largest, total = sums[:, :, :, 0], sums[:, :, :, 1]
        most = largest.max(axis=2)
        total = (total * jnp.exp2(largest - most[:, :, None])).sum(axis=2)
        # A query that sees nothing gives nothing: exp2(MASKED + MASKED) = 0.
        log_sum_exp = jnp.where(most > MASKED, most + jnp.log2(jnp.maximum(total, 1.0)), -MASKED)
        votes_s = plgpu.SMEM((self.results, self.keys), jnp.float32)
        return over_grid(
            self.vote_part,
            (batch, kv_heads, self.results, -(-slots // self.keys) * self.keys),
            [query_s, seen_s, number_s, votes_s, plgpu.Barrier(num_arrivals=3 * len(self.copied))],
        )(queries, kv, seen, log_sum_exp, lengths)

    def load(self, source_ref: Any, target: Any, arrived: Any) -> None:
        """Starts to copy R rows into shared memory."""
        for rows in self.copied:
            plgpu.copy_gmem_to_smem(source_ref.at[rows], target.at[rows], arrived)

    def stream(self, step: Any, first: Any, steps: Any, kv_ref: Any) -> None:
        """Runs `step` over blocks of keys as they arrive."""
        plgpu.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[
                plgpu.BlockSpec((self.keys, self.head_dim), lambda index: (first + index, 0), transforms=self.tiled)
            ],
            max_concurrent_steps=_STAGES,
        )(kv_ref)

    def scores(self, left: Any, right: Any) -> jax.Array:
        """Scaled products of the rows of two arrays in shared memory, in base 2, as the hardware's exponential is."""

        def multiply(sums_ref):
            plgpu.wgmma(sums_ref, left, right.transpose((1, 0)))
            return sums_ref[...]

        accumulator = plgpu.ACC((left.shape[0], right.shape[0]), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        products = pl.run_scoped(multiply, accumulator)
        return products * (self.head_dim**-0.5 * math.log2(math.e))

    def sum_part(self, query_ref, kv_ref, seen_ref, lengths_ref, sums_ref, query_s, seen_s, sums_s, arrived) -> None:
        """Writes each query's largest score among one part of a head's tokens, and its sum of powers."""
        row, head, part = (lax.axis_index(name) for name in _GRID)
        first, steps = mosaic_gpu.share(lengths_ref[row, head], part, parts=self.parts, block=self.keys)
        self.load(query_ref.at[row, head], query_s, arrived)
        self.load(seen_ref.at[row, head], seen_s, arrived)
        plgpu.barrier_wait(arrived)
        tiles = self.rows // _ROWS

        # Between steps the sums wait in shared memory: all of them together would spill out of the registers.
        def start(tile, carry):
            for which, value in enumerate((MASKED, 0.0)):
                sums_s[which, pl.ds(tile * _ROWS, _ROWS)] = mosaic_gpu.filled((_ROWS,), value, _LAYOUT.reduce(1))
            return carry

        lax.fori_loop(0, tiles, start, 0)
        plgpu.commit_smem()

        def step(indices, keys_s):
            slot = plgpu.broadcasted_iota(jnp.int32, (_ROWS, self.keys), 1, layout=_LAYOUT)
            slot = slot + (first + indices[0]) * self.keys

            def one_tile(tile, carry):
                rows = pl.ds(tile * _ROWS, _ROWS)
                scores = self.scores(query_s.at[rows], keys_s)
                scores = jnp.where(slot < _across(seen_s.at[rows], 1, scores.shape), scores, MASKED)
                largest, total = (plgpu.load(sums_s.at[which, rows], layout=_LAYOUT.reduce(1)) for which in range(2))
                larger = jnp.maximum(largest, scores.max(axis=1))
                powers = jnp.exp2(scores - _spread(larger, 0, scores.shape))
                sums_s[0, rows] = larger
                sums_s[1, rows] = total * jnp.exp2(largest - larger) + powers.sum(axis=1)
                return carry

            lax.fori_loop(0, tiles, one_tile, 0)
            # All threads have read what the next copy overwrites.
            plgpu.commit_smem()

        self.stream(step, first, steps, kv_ref.at[row, head])
        plgpu.commit_smem()
        for which, rows in itertools.product(range(2), self.copied):
            plgpu.copy_smem_to_gmem(sums_s.at[which, rows], sums_ref.at[row, head, part, which, rows])
        plgpu.wait_smem_to_gmem(0)

    def vote_part(
        self, query_ref, kv_ref, seen_ref, log_sum_exp_ref, lengths_ref, votes_ref, query_s, seen_s, log_sum_exp_s,
        votes_s, arrived,
    ) -> None:  # fmt: skip
        """Writes the sums of the probabilities that one part of a head's tokens gets."""
        row, head, part = (lax.axis_index(name) for name in _GRID)
        first, steps = mosaic_gpu.share(lengths_ref[row, head], part, parts=self.parts, block=self.keys)
        for source, target in ((query_ref, query_s), (seen_ref, seen_s), (log_sum_exp_ref, log_sum_exp_s)):
            self.load(source.at[row, head], target, arrived)
        plgpu.barrier_wait(arrived)

        def step(indices, keys_s):
            offset = (first + indices[0]) * self.keys
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for half in range(self.keys // _ROWS):
                self.vote(keys_s, query_s, seen_s, log_sum_exp_s, votes_s, half * _ROWS, offset)
            # All threads have read what the next copy overwrites.
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(votes_s, votes_ref.at[row, head, :, pl.ds(offset, self.keys)])

        self.stream(step, first, steps, kv_ref.at[row, head])
        plgpu.wait_smem_to_gmem(0)

    def vote(self, keys_s, query_s, seen_s, log_sum_exp_s, votes_s, start: int, offset) -> None:
        """Writes the votes for the tokens of an accumulator, those from `start` on of a block's."""
        tokens, (members, products) = pl.ds(start, _ROWS), self.members
        slot = plgpu.broadcasted_iota(jnp.int32, (_ROWS, self.columns), 0, layout=_LAYOUT) + (offset + start)
        none = mosaic_gpu.filled((_ROWS,), 0.0, _LAYOUT.reduce(1))

        def one_member(member, most):
            def add(product, votes):
                columns = pl.ds((member * products + product) * self.columns, self.columns)
                scores = self.scores(keys_s.at[tokens], query_s.at[columns])
                powers = jnp.exp2(scores - _across(log_sum_exp_s.at[columns], 0, scores.shape))
                seen = slot < _across(seen_s.at[columns], 0, scores.shape)
                return votes + jnp.where(seen, powers, 0.0).sum(axis=1)

            votes = lax.fori_loop(0, products, add, none)
            if self.over_group == "none":
                votes_s[member, tokens] = votes
            return jnp.maximum(most, votes)

        most = lax.fori_loop(0, members, one_member, none)
        if self.over_group != "none":
            votes_s[0, tokens] = most


def _spread(values: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """A vector along one axis of an accumulator, repeated along the other."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [axis]), _LAYOUT)


def _across(ref: Any, reduced: int, shape: tuple[int, ...]) -> jax.Array:
    """A vector in shared memory, repeated along an accumulator's `reduced` axis."""
    return _spread(plgpu.load(ref, layout=_LAYOUT.reduce(reduced)), 1 - reduced, shape)
