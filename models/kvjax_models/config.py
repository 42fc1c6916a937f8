"""The static configuration of a Llama-family model."""

import dataclasses
import math
from types import MappingProxyType

from kvjax.rope import Rope

#: The largest size that is taken for one, and not for damage: far above every published model's.
LARGEST_SIZES = MappingProxyType(
    {
        "vocab_size": 1 << 24,
        "hidden_size": 1 << 20,
        "intermediate_size": 1 << 22,
        "num_hidden_layers": 1 << 12,
        "num_attention_heads": 1 << 12,
        "num_key_value_heads": 1 << 12,
        "head_dim": 1 << 14,
        # Positions are int32.
        "max_position_embeddings": (1 << 31) - 1,
    }
)

#: Bounds of `rms_norm_eps` and of RoPE's base, ends included: float32 holds what is computed of them.
EPSILON_RANGE = (1e-30, 1.0)
LARGEST_THETA = 1e15


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """What fixes a Llama's shapes and arithmetic, under Hugging Face's names; hashable.

    Attributes:
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_hidden_layers: L.
        num_attention_heads: N, a multiple of `num_key_value_heads`.
        num_key_value_heads: K.
        head_dim: D; N * D need not be `hidden_size`.
        max_position_embeddings: tokens of context that the model was trained for.
        rms_norm_eps: added to the mean square before its root is taken.
        rope: the rotary embedding, of the same `head_dim`.
        tie_word_embeddings: the embedding is the output matrix too.
        attention_bias: the query, key, value and output projections have biases.
        mlp_bias: the MLP's projections have biases.
        eos_token_ids: ids that end an answer; empty where the checkpoint names none.
        bos_token_id: id that begins a text, or None.

    Raises:
        ValueError: a size is none, or over `LARGEST_SIZES`; a number is out of range; a token is not in the vocabulary.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name, largest in LARGEST_SIZES.items():
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"`{name}` must be a positive integer, got {size!r}.")
            if size > largest:
                raise ValueError(f"`{name}` must be at most {largest}, got {size}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "`num_attention_heads` must be a multiple of `num_key_value_heads`, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}."
            )
        if self.rope.head_dim != self.head_dim:
            raise ValueError(
                f"`rope` must rotate whole heads: its head_dim is {self.rope.head_dim}, "
                f"the model's `head_dim` is {self.head_dim}."
            )
        if not math.isfinite(self.rope.theta) or not 1 < self.rope.theta <= LARGEST_THETA:
            raise ValueError(f"`rope.theta` must be above 1 and at most {LARGEST_THETA:g}, got {self.rope.theta!r}.")
        if not self.rms_norm_eps > 0:
            raise ValueError(f"`rms_norm_eps` must be positive, got {self.rms_norm_eps!r}.")
        smallest, largest = EPSILON_RANGE
        if not smallest <= self.rms_norm_eps <= largest:
            raise ValueError(f"`rms_norm_eps` must be from {smallest:g} to {largest:g}, got {self.rms_norm_eps!r}.")
        named = {"eos_token_ids": self.eos_token_ids, "bos_token_id": (self.bos_token_id,)}
        for name, tokens in named.items():
            for token in tokens:
                if token is not None and (type(token) is not int or not 0 <= token < self.vocab_size):
                    raise ValueError(f"`{name}` must be in the vocabulary of {self.vocab_size} tokens, got {token!r}.")
