"""What `ragged_decode_attention` gives, and what its kernels give first."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


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


class Parts(NamedTuple):
    """Attention of each query head over P disjoint parts of its tokens; float32, G = N / K.

    Attributes:
        output: [B, K, P, G, D], normalised within the part; zeros where it saw no token.
        log_sum_exp: [B, K, P, G], natural, of the scaled scores; -1e30 where it saw no token.
        scores: [B, K, G, C], the scaled score of each token, or None; anything past a head's length.
        origins: [B, K], the slot of the first column of `scores`; None where it is the head's first slot.
    """

    output: Float[Array, "B K P G D"]
    log_sum_exp: Float[Array, "B K P G"]
    scores: Float[Array, "B K G C"] | None = None
    origins: Int[Array, "B K"] | None = None
