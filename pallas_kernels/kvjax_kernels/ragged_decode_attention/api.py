"""`ragged_decode_attention`: checks arguments and chooses an implementation."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class DecodeAttention(NamedTuple):
    """What one decoding step's attention gives, float32.

    Attributes:
        output: [B, N, D]; zeros where a head holds no token.
        log_sum_exp: [B, N], natural, of the scaled scores; -1e30 where a head holds no token.
        token_attention: [B, S], each cached token's probability summed over its group's query heads, zeros in
            empty slots; None unless asked for.
    """

    output: Float[Array, "B N D"]
    log_sum_exp: Float[Array, "B N"]
    token_attention: Float[Array, "B S"] | None


def ragged_decode_attention(
    query: Float[Array, "B N D"],
    kv: Float[Array, "B S twoD"],
    lengths: Int[Array, "B K"],
    *,
    segments: tuple[int, ...],
    scale: float | None = None,
    sink_query: Float[Array, "B N D"] | None = None,
    sinks: int = 0,
    token_attention: bool = False,
    implementation: str | None = None,
) -> DecodeAttention:
    """Attends one query token a row to the first `lengths` rows of each KV head's segment.

    Args:
        query: rotated queries; N is a multiple of K, consecutive heads share a KV head.
        kv: cached rows, key then value; the KV heads' segments lie one after another along S.
        lengths: tokens held by each head; slots past it may hold anything, NaN included.
        segments: slots of each KV head; their sum is S.
        scale: factor of the scores, 1 / sqrt(D) by default.
        sink_query: queries rotated for another distance, used for the first `sinks` slots of each segment.
        sinks: how many; 0 without `sink_query`.
        token_attention: whether each token's summed probability is wanted.
        implementation: "xla" or "reference"; None picks by platform.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
    """
    batch, query_heads, head_dim = query.shape
    if kv.shape[-1] != 2 * head_dim:
        raise ValueError(f"`kv` rows must hold key and value, 2 * {head_dim} wide, got {kv.shape[-1]}.")
    if sum(segments) != kv.shape[1]:
        raise ValueError(f"`segments` must add up to the {kv.shape[1]} slots of `kv`, got {segments}.")
    if lengths.shape != (batch, len(segments)):
        raise ValueError(f"`lengths` must be [{batch}, {len(segments)}], got {list(lengths.shape)}.")
    if query_heads % len(segments):
        raise ValueError(f"{query_heads} query heads do not group over {len(segments)} KV heads.")
    if (sink_query is None) != (sinks == 0):
        raise ValueError(f"`sink_query` and `sinks` go together, got sinks = {sinks}.")
    run = _implementation(implementation)
    return run(
        query,
        kv,
        lengths,
        segments=segments,
        scale=head_dim**-0.5 if scale is None else scale,
        sink_query=sink_query,
        sinks=sinks,
        token_attention=token_attention,
    )


def _implementation(name: str | None):
    # Imported here, so that a backend's module is loaded only where it is used.
    if name is None or name == "xla":
        from kvjax_kernels.ragged_decode_attention import xla

        return xla.ragged_decode_attention
    if name == "reference":
        from kvjax_kernels.ragged_decode_attention import reference

        return reference.ragged_decode_attention
    raise ValueError(f'`implementation` must be "xla" or "reference", got {name!r}.')


def head_starts(segments: tuple[int, ...]) -> tuple[int, ...]:
    """The first slot of each KV head's segment."""
    return tuple(sum(segments[:head]) for head in range(len(segments)))


__all__ = ["DecodeAttention", "head_starts", "ragged_decode_attention"]
