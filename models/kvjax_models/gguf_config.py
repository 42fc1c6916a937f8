"""Reads the configuration from the metadata of a GGUF file whose architecture is "llama"."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.rope import LinearScaling, Llama3Scaling, Rope
from kvjax_models.config import LlamaConfig
from kvjax_models.gguf_stop_tokens import end_of_turn_ids

# Key: the only values under which the model is the plain Llama that is built here, the default first.
_ONLY = {
    "llama.expert_count": (0,),
    "llama.attention.sliding_window": (0,),
    "llama.attention.causal": (True,),
    "llama.attention.scale": (0.0,),
    "llama.attention.clamp_kqv": (0.0,),
    "llama.logit_scale": (0.0, 1.0),
    "llama.residual_scale": (0.0, 1.0),
    "llama.embedding_scale": (0.0, 1.0),
    "llama.use_parallel_residual": (False,),
    "llama.rope.scaling.attn_factor": (1.0,),
    "split.count": (0, 1),
}
_STOP_KEYS = ("eos", "eot", "eom")


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    tensor_names: Collection[str],
    rope_factors: Float[np.ndarray, "half"] | None = None,
) -> LlamaConfig:
    """Builds the configuration that a GGUF file describes.

    Args:
        metadata: the file's key-value pairs.
        tensor_names: the file's tensors; biases and a separate output matrix are known by their presence.
        rope_factors: the tensor rope_freqs.weight, where there is one.

    Raises:
        ValueError: a key is missing, wrong or not supported; the message names it and its value.
    """
    architecture = _required(metadata, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"`general.architecture` must be 'llama', got {architecture!r}.")
    for key, allowed in _ONLY.items():
        if metadata.get(key, allowed[0]) not in allowed:
            raise ValueError(f"`{key}` must be {allowed[0]!r}, got {metadata[key]!r}: not supported.")
    hidden = _size(metadata, "llama.embedding_length")
    heads = _size(metadata, "llama.attention.head_count")
    head_dim = _head_dim(metadata, hidden=hidden, heads=heads)
    return LlamaConfig(
        vocab_size=_vocab_size(metadata),
        hidden_size=hidden,
        intermediate_size=_size(metadata, "llama.feed_forward_length"),
        num_hidden_layers=_size(metadata, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_size(metadata, "llama.attention.head_count_kv", default=heads),
        head_dim=head_dim,
        max_position_embeddings=_size(metadata, "llama.context_length"),
        rms_norm_eps=_shortest(_required(metadata, "llama.attention.layer_norm_rms_epsilon")),
        rope=_rope(metadata, head_dim=head_dim, factors=rope_factors),
        tie_word_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        eos_token_ids=_stop_ids(metadata),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def llama3_scaling_from_factors(rope: Rope, factors: Float[np.ndarray, "half"]) -> Llama3Scaling | None:
    """The scaling whose divisors of `rope`'s frequencies are `factors`; None where all are 1.

    llama.cpp's converter turns Llama 3.1's scaling into the tensor rope_freqs.weight and keeps no trace of
    the settings. Every published Llama ramps between 1 and 4 turns of its original context, a power of two.

    Raises:
        ValueError: no such scaling gives `factors`.
    """
    plain = rope.frequencies()
    if factors.shape != plain.shape:
        raise ValueError(f"the tensor 'rope_freqs.weight' must be {plain.shape}, got {factors.shape}.")
    if np.all(factors == 1):
        return None
    for original in (8192, *(2**bits for bits in range(6, 21))):
        scaling = Llama3Scaling(
            factor=_shortest(float(factors.max())),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=original,
        )
        if np.allclose(plain / scaling(plain), factors, rtol=1e-4, atol=0):
            return scaling
    raise ValueError(
        "the tensor 'rope_freqs.weight' must hold Llama 3's RoPE scaling (1 to 4 turns of the original "
        f"context), got factors from {factors.min()} to {factors.max()} that no such scaling gives."
    )


def _rope(metadata: Mapping[str, Any], *, head_dim: int, factors: Float[np.ndarray, "half"] | None) -> Rope:
    rope = Rope(head_dim=head_dim, theta=_shortest(metadata.get("llama.rope.freq_base", 10000.0)))
    # Without a type llama.cpp scales linearly; `scale_linear` is the key's name in old files.
    kind = metadata.get("llama.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ValueError(f"`llama.rope.scaling.type` must be 'none' or 'linear', got {kind!r}: not supported.")
    factor = metadata.get("llama.rope.scaling.factor", metadata.get("llama.rope.scale_linear", 0.0))
    scaling = None if kind == "none" or factor in (0.0, 1.0) else LinearScaling(factor=_shortest(factor))
    if factors is not None:
        if scaling is not None:
            raise ValueError(f"`llama.rope.scaling.factor` is {factor!r} beside a tensor 'rope_freqs.weight'.")
        scaling = llama3_scaling_from_factors(rope, factors)
    return Rope(head_dim=head_dim, theta=rope.theta, scaling=scaling)


def _head_dim(metadata: Mapping[str, Any], *, hidden: int, heads: int) -> int:
    if "llama.attention.key_length" not in metadata and hidden % heads:
        raise ValueError(
            "`llama.embedding_length` must be a multiple of `llama.attention.head_count` where "
            f"`llama.attention.key_length` is not given, got {hidden} and {heads}."
        )
    head_dim = _size(metadata, "llama.attention.key_length", default=hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise ValueError(f"`{key}` must be the head size {head_dim}, got {metadata[key]!r}: not supported.")
    return head_dim


def _vocab_size(metadata: Mapping[str, Any]) -> int:
    if "llama.vocab_size" in metadata:
        return _size(metadata, "llama.vocab_size")
    return len(_required(metadata, "tokenizer.ggml.tokens"))


def _stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _STOP_KEYS)
    return tuple(dict.fromkeys([*(token for token in ids if token is not None), *end_of_turn_ids(metadata)]))


def _size(metadata: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    size = metadata.get(key, default)
    if size is None:
        raise ValueError(f"`{key}` is missing.")
    if not isinstance(size, int):
        raise ValueError(f"`{key}` must be one number for all layers, got {size!r}: not supported.")
    return size


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"`{key}` is missing.")
    return metadata[key]


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-5, as in config.json, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
