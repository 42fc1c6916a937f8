"""How many rows of a cache one decoding step's attention loads, by the kernels' own blocks; nothing is computed."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax_kernels.split_rows import head_starts


def backend_for(
    backend: str, *, batch: int, query_heads: int, kv_heads: int, slots: int, head_dim: int, dtype: str
) -> str:
    """The backend that runs where nothing is forced: "xla" where the kernel of `backend` cannot do these shapes.

    Args:
        backend: "tpu", "gpu" or "xla".
        batch: rows.
        query_heads: N.
        kv_heads: K.
        slots: S.
        head_dim: D.
        dtype: of the cache, and of the queries.
    """
    if backend == "xla":
        return backend

    def unsupported(query: jax.Array, kv: jax.Array, lengths: jax.Array) -> str | None:
        kernel = importlib.import_module(f"kvjax_kernels.ragged_decode_attention.{backend}")
        return kernel.unsupported_shapes(query, kv, lengths)

    query = jax.ShapeDtypeStruct((batch, query_heads, head_dim), jnp.dtype(dtype))
    kv = jax.ShapeDtypeStruct((batch, slots, 2 * head_dim), jnp.dtype(dtype))
    lengths = jax.ShapeDtypeStruct((batch, kv_heads), jnp.int32)
    return backend if _of_shapes(unsupported, query, kv, lengths) is None else "xla"


def loaded_rows(
    backend: str,
    lengths: np.ndarray,
    *,
    segments: tuple[int, ...] | None = None,
    starts: np.ndarray | None = None,
    slots: int,
    head_dim: int,
    dtype: str,
) -> int:
    """Rows that one layer's attention loads in one step, of all sequences and heads.

    A kernel loads what each head holds, in whole blocks or tiles. Plain JAX ("xla") does so where heads differ; where
    all segments are equal it loads every slot, once for the scores and once for the values.

    Args:
        backend: "tpu", "gpu" or "xla".
        lengths: [B, K], tokens held by each head.
        segments: see `api.ragged_decode_attention`.
        starts: see there; one of the two.
        slots: S.
        head_dim: D.
        dtype: of the cache.
    """
    batch, kv_heads = lengths.shape
    if backend == "xla":
        from kvjax_kernels.ragged_decode_attention import xla_blocks

        if segments is not None and len(set(segments)) == 1:
            return 2 * batch * slots
        blocks = xla_blocks.loaded_blocks(lengths.astype(np.int64), slots)
        return int(blocks.sum()) * xla_blocks.block_rows(slots)
    if backend == "gpu":
        from kvjax_kernels import mosaic_gpu
        from kvjax_kernels.ragged_decode_attention import gpu

        block = gpu.block_rows(head_dim)
        # However many parts share a head's blocks, they are as many in all.
        _, blocks = mosaic_gpu.share(lengths.astype(np.int64), 0, parts=1, block=block)
        return int(blocks.sum()) * block
    from kvjax_kernels.ragged_decode_attention import tpu_plan

    kv = jax.ShapeDtypeStruct((batch, slots, 2 * head_dim), jnp.dtype(dtype))
    plan = _of_shapes(lambda x: tpu_plan.make_plan(x, kv_heads, segments=segments, cores=1), kv)
    if starts is None:
        assert segments is not None
        starts = np.asarray(head_starts(segments))[None]
    stop = starts.astype(np.int64) % plan.tile + lengths
    # What a head holds, rounded to tiles at both ends.
    return int(np.where(lengths > 0, -(-stop // plan.tile) * plan.tile, 0).sum())


def score_rows(backend: str, group: int) -> int:
    """Rows of float32 scores that the kernel writes for each KV head where they are wanted.

    Args:
        backend: "tpu", "gpu" or "xla".
        group: query heads of a KV head.
    """
    # A TPU's rows come in eights.
    return -(-group // 8) * 8 if backend == "tpu" else group


def _of_shapes(function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> Any:
    """What a function that looks at shapes only gives for arrays of these."""
    found = []
    jax.eval_shape(lambda *arrays: found.append(function(*arrays)), *shapes)
    return found[0]
