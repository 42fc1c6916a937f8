"""The static configuration of a Llama-family model."""

import dataclasses

from kvjax.rope import Rope

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)


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
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"`{name}` must be a positive integer, got {size!r}.")
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
        if not self.rms_norm_eps > 0:
            raise ValueError(f"`rms_norm_eps` must be positive, got {self.rms_norm_eps!r}.")
