"""What a model of a configuration weighs, without making it."""

import jax.numpy as jnp
from jaxtyping import DTypeLike

from kvjax.memory import ModelSize
from kvjax.state import ModelSpec
from kvjax_models.config import LlamaConfig


def model_spec(config: LlamaConfig, dtype: DTypeLike) -> ModelSpec:
    """What a `Llama` of this configuration has as its `spec`."""
    return ModelSpec(
        num_layers=config.num_hidden_layers,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        dtype=jnp.dtype(dtype).name,
        rope=config.rope,
        stop_tokens=config.eos_token_ids,
    )


def model_size(config: LlamaConfig, dtype: DTypeLike) -> ModelSize:
    """The bytes of its parameters, and of what a token of a prompt takes while it goes through a layer."""
    itemsize = jnp.dtype(dtype).itemsize
    parameters = parameter_count(config)
    # A step looks up one row a token in an embedding that is not the output matrix too.
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    query, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    return ModelSize(
        weight_bytes=itemsize * parameters,
        step_bytes=itemsize * (parameters - looked_up),
        # The residual stream, and its norm or what is added to it.
        shared_token_bytes=itemsize * 2 * config.hidden_size,
        # The MLP's gate and up, or attention's queries and keys, before and after their rotation, values and output.
        split_token_bytes=itemsize * max(2 * config.intermediate_size, 3 * query + 3 * kv),
    )


def parameter_count(config: LlamaConfig) -> int:
    """Numbers in all parameters."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer = 2 * hidden * (query + kv) + 3 * hidden * inner + 2 * hidden
    if config.attention_bias:
        layer += query + 2 * kv + hidden
    if config.mlp_bias:
        layer += 2 * inner + hidden
    embeddings = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + embeddings * config.vocab_size * hidden + hidden
