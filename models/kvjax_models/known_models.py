"""The shapes of well-known Llamas, for plans and for compiling without weights."""

import dataclasses
from types import MappingProxyType

from kvjax.rope import Llama3Scaling, Rope
from kvjax_models.config import LlamaConfig


def _stretched(factor: float, *, head_dim: int) -> Rope:
    """The rotations of Llama 3.1 and 3.2, stretched from 8,192 positions."""
    scaling = Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    return Rope(head_dim=head_dim, theta=500000.0, scaling=scaling)


_SMOLLM2_135M = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=Rope(head_dim=64, theta=100000.0),
    tie_word_embeddings=True,
)

_SMOLLM2_360M = dataclasses.replace(
    _SMOLLM2_135M,
    hidden_size=960,
    intermediate_size=2560,
    num_hidden_layers=32,
    num_attention_heads=15,
    num_key_value_heads=5,
)

_TINYLLAMA_1_1B = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope=Rope(head_dim=64, theta=10000.0),
)

_LLAMA_2_7B = LlamaConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    rope=Rope(head_dim=128, theta=10000.0),
)

_LLAMA_2_13B = dataclasses.replace(
    _LLAMA_2_7B,
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=40,
    num_attention_heads=40,
    num_key_value_heads=40,
)

_LLAMA_2_70B = dataclasses.replace(
    _LLAMA_2_7B,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)

_LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=Rope(head_dim=128, theta=500000.0),
)

_LLAMA_3_70B = dataclasses.replace(
    _LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
)

_LLAMA_3_1_8B = dataclasses.replace(_LLAMA_3_8B, max_position_embeddings=131072, rope=_stretched(8.0, head_dim=128))

_LLAMA_3_1_70B = dataclasses.replace(_LLAMA_3_70B, max_position_embeddings=131072, rope=_stretched(8.0, head_dim=128))

_LLAMA_3_1_405B = dataclasses.replace(
    _LLAMA_3_1_70B, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128
)

_LLAMA_3_2_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope=_stretched(32.0, head_dim=64),
    tie_word_embeddings=True,
)

_LLAMA_3_2_3B = dataclasses.replace(
    _LLAMA_3_2_1B,
    hidden_size=3072,
    num_hidden_layers=28,
    num_attention_heads=24,
    head_dim=128,
    rope=_stretched(32.0, head_dim=128),
)

# Version 0.3: version 0.1 has a sliding window, which is not supported.
_MISTRAL_7B = dataclasses.replace(
    _LLAMA_3_8B,
    vocab_size=32768,
    max_position_embeddings=32768,
    rope=Rope(head_dim=128, theta=1000000.0),
)

#: Configurations by name.
KNOWN_MODELS = MappingProxyType(
    {
        "smollm2-135m": _SMOLLM2_135M,
        "smollm2-360m": _SMOLLM2_360M,
        "tinyllama-1.1b": _TINYLLAMA_1_1B,
        "llama-2-7b": _LLAMA_2_7B,
        "llama-2-13b": _LLAMA_2_13B,
        "llama-2-70b": _LLAMA_2_70B,
        "llama-3-8b": _LLAMA_3_8B,
        "llama-3-70b": _LLAMA_3_70B,
        "llama-3.1-8b": _LLAMA_3_1_8B,
        "llama-3.1-70b": _LLAMA_3_1_70B,
        "llama-3.1-405b": _LLAMA_3_1_405B,
        "llama-3.2-1b": _LLAMA_3_2_1B,
        "llama-3.2-3b": _LLAMA_3_2_3B,
        "mistral-7b-v0.3": _MISTRAL_7B,
    }
)
