"""`ragged_decode_attention`: checks arguments and chooses an implementation."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from kvjax_kernels.dispatch import choose
from kvjax_kernels.split_rows import SplitRows, join_rows

_APART = "it reads rows of key and value, and these are split (see `split_rows`)"


class DecodeAttention(NamedTuple):
    """What one decoding step's attention gives, float32.

    Attributes:
        output: [B, N, D]; zeros where a head sees no token.
        log_sum_exp: [B, N], natural, of the scaled scores; -1e30 where a head sees no token.
        token_attention: [B, S], each cached token's probability summed over its group's query heads, zeros in
            empty slots; None unless asked for.
        own_attention: [B, K], the same for the asking token; None unless asked for.
    """

    output: Float[Array, "B N D"]
    log_sum_exp: Float[Array, "B N"]
    token_attention: Float[Array, "B S"] | None
    own_attention: Float[Array, "B K"] | None


def ragged_decode_attention(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"] | SplitRows,
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...] | None = None,
    starts: Int[Array, "B K"] | None = None,
    own_key: Float[Array, "B K D"] | None = None,
    own_value: Float[Array, "B K D"] | None = None,
    scale: float | None = None,
    sink_query: Float[Array, "B N D"] | None = None,
    sinks: int = 0,
    token_attention: bool = False,
    implementation: str | None = None,
) -> DecodeAttention:
    """Attends one query token a row to the first `lengths` rows of each KV head's segment, and to itself.

    Args:
        query: rotated queries; N is a multiple of K, consecutive heads share a KV head.
        kv: cached rows, key then value; the KV heads' segments lie one after another along S. Or the same taken apart
            by `split_rows`, which only "xla" and "reference" read.
        lengths: tokens held by each head; slots past it may hold anything, NaN included.
        segments: slots of each KV head, where all rows have the same; their sum is S.
        starts: first slot of each KV head, where every row has its own. One of `segments` and `starts`.
        own_key: the rotated key of the token that asks, which is not in `kv`; None to leave it out.
        own_value: its value.
        scale: factor of the scores, 1 / sqrt(D) by default.
        sink_query: queries rotated for another distance, used for the first `sinks` slots of each segment; only
            with `segments`.
        sinks: how many; 0 without `sink_query`.
        token_attention: whether each token's summed probability is wanted.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None picks by platform.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    batch, query_heads, head_dim = query.shape
    kv_heads = lengths.shape[1]
    if (segments is None) == (starts is None):
        raise ValueError("one of `segments` and `starts` must be given, got both or neither.")
    if isinstance(kv, SplitRows):
        _check_split(kv, segments, head_dim)
    elif kv.shape[-1] != 2 * head_dim:
        raise ValueError(f"`kv` rows must hold key and value, 2 * {head_dim} wide, got {kv.shape[-1]}.")
    elif segments is not None and sum(segments) != kv.shape[1]:
        raise ValueError(f"`segments` must add up to the {kv.shape[1]} slots of `kv`, got {segments}.")
    if (segments is not None and len(segments) != kv_heads) or lengths.shape[0] != batch:
        heads = kv_heads if segments is None else len(segments)
        raise ValueError(f"`lengths` must be [{batch}, {heads}], got {list(lengths.shape)}.")
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads do not group over {kv_heads} KV heads.")
    if (sink_query is None) != (sinks == 0):
        raise ValueError(f"`sink_query` and `sinks` go together, got sinks = {sinks}.")
    if sink_query is not None and segments is None:
        raise ValueError("`sink_query` needs `segments`, got `starts`.")
    if (own_key is None) != (own_value is None):
        raise ValueError("`own_key` and `own_value` go together.")
    factor = float(head_dim) ** -0.5 if scale is None else scale

    def no_tpu() -> str | None:
        if isinstance(kv, SplitRows):
            return _APART
        from kvjax_kernels.ragged_decode_attention import tpu

        return tpu.obstacle(query, kv, lengths, segments=segments, sinks=sinks)

    def no_gpu() -> str | None:
        if isinstance(kv, SplitRows):
            return _APART
        from kvjax_kernels.ragged_decode_attention import gpu

        interpret = implementation == "gpu-interpret"
        return gpu.obstacle(query, kv, lengths, segments=segments, sinks=sinks, interpret=interpret)

    choice = choose("ragged_decode_attention", implementation, {"tpu": no_tpu, "gpu": no_gpu})
    asking: dict[str, Any] = {
        "own_key": own_key,
        "own_value": own_value,
        "scale": factor,
        "sink_query": sink_query,
        "sinks": sinks,
        "token_attention": token_attention,
    }
    # Imported here, so that a backend's module is loaded only where it is used.
    if isinstance(kv, SplitRows):
        assert segments is not None
        if choice.backend == "xla":
            from kvjax_kernels.ragged_decode_attention.xla_split import ragged_decode_attention as run_split

            return run_split(query, kv, lengths, segments=segments, **asking)
        kv = join_rows(kv, segments)
    if choice.backend in ("xla", "reference"):
        if choice.backend == "xla":
            from kvjax_kernels.ragged_decode_attention.xla import ragged_decode_attention as run
        else:
            from kvjax_kernels.ragged_decode_attention.reference import ragged_decode_attention as run
        return run(query, kv, lengths, segments=segments, starts=starts, **asking)
    if choice.backend == "tpu":
        from kvjax_kernels.ragged_decode_attention.tpu import attend_parts
    else:
        from kvjax_kernels.ragged_decode_attention.gpu import attend_parts
    from kvjax_kernels.ragged_decode_attention.parts import combine

    parts = attend_parts(
        query,
        kv,
        lengths,
        segments=segments,
        starts=starts,
        scale=factor,
        sink_query=sink_query,
        sinks=sinks,
        scores=token_attention,
        interpret=choice.interpret,
    )
    return combine(
        parts,
        query,
        lengths,
        slots=kv.shape[1],
        segments=segments,
        starts=starts,
        own_key=own_key,
        own_value=own_value,
        scale=factor,
    )


def _check_split(rows: SplitRows, segments: tuple[int, ...] | None, head_dim: int) -> None:
    if segments is None:
        raise ValueError("`kv` that is split needs `segments`, got `starts`.")
    sizes = list(dict.fromkeys(segments))
    shapes = [(*key.shape[1:], *value.shape[1:]) for key, value in zip(rows.keys, rows.values, strict=True)]
    expected = [(n := segments.count(size), head_dim, size, n, size, head_dim) for size in sizes]
    if shapes != expected:
        raise ValueError(f"`kv` must be split by `segments`, {segments}, got arrays of {shapes}.")


def head_starts(segments: tuple[int, ...]) -> tuple[int, ...]:
    """The first slot of each KV head's segment."""
    return tuple(sum(segments[:head]) for head in range(len(segments)))


__all__ = ["DecodeAttention", "head_starts", "ragged_decode_attention"]
