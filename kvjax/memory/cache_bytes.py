"""Bytes of caches, held and read, from shapes alone.

M_KV = 2 B L n K D P is the formula for a full cache: keys and values, B batch, L layers, n tokens, K KV heads, D head
dim, P bytes a number.
"""

import collections
import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from kvjax.allocation import bucket, bucket_start
from kvjax.policies import Policy
from kvjax.state import LayerSpec, ModelSpec
from kvjax.steps import dtype_name
from kvjax_kernels.ragged_decode_attention import traffic

# Of a position, a length, a start (int32) and a score (float32).
_WORD = 4


def full_cache_bytes(model: ModelSpec, *, batch: int, length: int, dtype: str | None = None) -> int:
    """M_KV = 2 B L n K D P: keys and values of `length` tokens in every row.

    Args:
        model: L, K and D.
        batch: B.
        length: n.
        dtype: of cached numbers, which gives P; the model's by default.
    """
    numbers = 2 * batch * model.num_layers * length * model.num_kv_heads * model.head_dim
    return numbers * itemsize(dtype_name(dtype) or model.dtype)


def state_bytes(
    policy: Policy, model: ModelSpec, lengths: Sequence[int], *, max_new_tokens: int, dtype: str | None = None
) -> int:
    """Bytes of all arrays of the cache that `kvjax.prefill` makes, as `kvjax.cache_bytes` counts them of a real one.

    Args:
        policy: the policy.
        model: the model.
        lengths: tokens of each row's prompt.
        max_new_tokens: as for `kvjax.prefill`.
        dtype: of cached keys and values; the model's by default.

    Raises:
        ValueError: the policy cannot have what it asks for with rows so short.
    """
    specs = prompt_specs(policy, model, lengths, max_new_tokens=max_new_tokens, dtype=dtype)
    # The cache's own array: each row's next position.
    return len(lengths) * (sum(_layer_bytes(policy, spec) for spec in specs) + _WORD)


def step_bytes(
    policy: Policy,
    model: ModelSpec,
    length: int,
    *,
    backend: str,
    max_new_tokens: int,
    batch: int = 1,
    dtype: str | None = None,
) -> int:
    """Bytes that a decoding step moves for each row, halfway through the answer: weights not counted.

    They are the rows that the attention's kernel loads for what each head holds, in whole blocks. Where the policy
    evicts while decoding there are also the scores: those of this step, written and read, and those remembered, read
    and written, and the positions. Not counted: the new token, queries and outputs.

    Args:
        policy: the policy.
        model: the model.
        length: tokens of the row's prompt.
        backend: whose kernel runs, "tpu", "gpu" or "xla"; where it cannot, "xla" does.
        max_new_tokens: the answer's room.
        batch: rows.
        dtype: of cached keys and values; the model's by default.
    """
    specs = prompt_specs(policy, model, [length], max_new_tokens=max_new_tokens, dtype=dtype)
    held = held_tokens(policy, model, length, answered=max_new_tokens // 2, max_new_tokens=max_new_tokens)
    # Most layers are alike.
    layers = collections.Counter(
        (dataclasses.replace(spec, layer=0), tokens) for spec, tokens in zip(specs, held, strict=True)
    )
    return sum(
        count * _layer_step_bytes(policy, spec, tokens, backend=backend, batch=batch)
        for (spec, tokens), count in layers.items()
    )


def held_tokens(
    policy: Policy, model: ModelSpec, length: int, *, answered: int, max_new_tokens: int
) -> list[tuple[int, ...]]:
    """Tokens that each layer's KV heads hold of a row; the mean of the heads, for each, where they share slots.

    Args:
        policy: the policy.
        model: the model.
        length: tokens of the row's prompt.
        answered: tokens decoded since.
        max_new_tokens: the answer's room.
    """
    # Shapes for this length alone, with no padding: no more slots than tokens that a head can come to hold.
    specs = policy.layer_specs(model, length, max_new_tokens, shortest=length)
    return [
        tuple(min(min(kept, length) + answered, slots) for kept, slots in zip(spec.kept, spec.slots, strict=True))
        for spec in specs
    ]


def prompt_specs(
    policy: Policy, model: ModelSpec, lengths: Sequence[int], *, max_new_tokens: int, dtype: str | None = None
) -> tuple[LayerSpec, ...]:
    """The layers' shapes that `kvjax.prefill` asks for, with rows of these lengths."""
    policy.check_lengths(np.asarray(lengths))
    return policy.layer_specs(
        model,
        bucket(max(lengths)),
        max_new_tokens,
        shortest=bucket_start(min(lengths)),
        dtype=dtype_name(dtype),
    )


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return jnp.dtype(dtype).itemsize


def _layer_bytes(policy: Policy, spec: LayerSpec) -> int:
    """Of one row's arrays in a `LayerState`."""
    slots, heads = sum(spec.slots), len(spec.slots)
    rows = slots * 2 * spec.model.head_dim * itemsize(spec.dtype)
    by_slot = 2 if policy.remembers_scores else 1  # Positions, scores.
    by_head = 2 if spec.shared else 1  # Lengths, starts.
    return rows + _WORD * (by_slot * slots + by_head * heads)


def _layer_step_bytes(policy: Policy, spec: LayerSpec, held: tuple[int, ...], *, backend: str, batch: int) -> int:
    model, slots = spec.model, sum(spec.slots)
    shape = {"slots": slots, "head_dim": model.head_dim, "dtype": spec.dtype}
    heads = {"query_heads": model.num_query_heads, "kv_heads": model.num_kv_heads}
    backend = traffic.backend_for(backend, batch=batch, **heads, **shape)
    rows = traffic.loaded_rows(
        backend,
        np.asarray([held]),
        segments=None if spec.shared else spec.slots,
        starts=np.asarray([spec.starts]) if spec.shared else None,
        **shape,
    )
    loaded = rows * 2 * model.head_dim * itemsize(spec.dtype)
    if not policy.remembers_scores:
        return loaded
    scores = traffic.score_rows(backend, model.num_query_heads // model.num_kv_heads)
    return loaded + slots * _WORD * (2 * scores + 3)
