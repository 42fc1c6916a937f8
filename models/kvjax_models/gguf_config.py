"""Reads the configuration from the metadata of a GGUF file whose architecture is "llama"."""

import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from kvjax.fields import Fields
from kvjax.rope import LinearScaling, Llama3Scaling, Rope
from kvjax_models.config import EPSILON_RANGE, LARGEST_SIZES, LARGEST_THETA, LlamaConfig
from kvjax_models.gguf_stop_tokens import end_of_turn_ids
from kvjax_models.hugging_face_rope import FACTOR_RANGE

# Key: the only values under which the model is the plain Llama that is built here, the default first.
_ONLY: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),
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
    "llama.rope.scaling.yarn_attn_factor": (1.0,),
    "llama.rope.scaling.yarn_ext_factor": (0.0, -1.0),
    "split.count": (0, 1),
}
# What is read below, and what leaves the arithmetic as it is; another key under "llama." must say "none".
_KNOWN = """
    vocab_size context_length embedding_length block_count feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor rope.scale_linear
    rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    attention.layer_norm_epsilon tensor_data_layout pooling_type
""".split()  # noqa: SIM905 (a list takes a line for each)
_STOP_KEYS = ("eos", "eot", "eom")
_SIZES = {
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "max_position_embeddings": "llama.context_length",
}


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    tensor_names: Collection[str],
    rope_factors: Float[np.ndarray, "*half"] | None = None,
    source: str | pathlib.Path = "the GGUF file",
) -> LlamaConfig:
    """Builds the configuration that a GGUF file describes.

    Args:
        metadata: the file's key-value pairs.
        tensor_names: the file's tensors; biases and a separate output matrix are known by their presence.
        rope_factors: the tensor rope_freqs.weight, where there is one.
        source: the file, for messages.

    Raises:
        ValueError: a key is missing, wrong or not supported; the message names it and its value.
    """
    fields = Fields(metadata, source=source)
    _check_supported(fields)
    sizes = {name: _size(fields, key, name) for name, key in _SIZES.items()}
    heads = _size(fields, "llama.attention.head_count", "num_attention_heads")
    head_dim = _head_dim(fields, hidden=sizes["hidden_size"], heads=heads)
    vocab_size = _vocab_size(fields)
    smallest, largest = EPSILON_RANGE
    return LlamaConfig(
        **sizes,
        vocab_size=vocab_size,
        num_attention_heads=heads,
        num_key_value_heads=_size(fields, "llama.attention.head_count_kv", "num_key_value_heads", default=heads),
        head_dim=head_dim,
        rms_norm_eps=_shortest(
            fields.number("llama.attention.layer_norm_rms_epsilon", at_least=smallest, at_most=largest)
        ),
        rope=_rope(fields, head_dim=head_dim, factors=rope_factors),
        tie_word_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        eos_token_ids=_stop_ids(fields, vocab_size),
        bos_token_id=fields.integer("tokenizer.ggml.bos_token_id", None, at_most=vocab_size - 1),
    )


def llama3_scaling_from_factors(rope: Rope, factors: Float[np.ndarray, "*half"]) -> Llama3Scaling | None:
    """The scaling whose divisors of `rope`'s frequencies are `factors`; None where all are 1.

    llama.cpp's converter turns Llama 3.1's scaling into the tensor rope_freqs.weight and keeps no trace of
    the settings. Every published Llama ramps between 1 and 4 turns of its original context, a power of two.

    Raises:
        ValueError: no such scaling gives `factors`.
    """
    plain = rope.frequencies()
    if factors.shape != plain.shape:
        raise ValueError(f"the tensor 'rope_freqs.weight' must be {plain.shape}, got {factors.shape}.")
    factors = factors.astype(np.float32)
    if np.all(factors == 1):
        return None
    smallest, largest = FACTOR_RANGE
    for original in (8192, *(2**bits for bits in range(6, 21))):
        # Not a number is in no range.
        if not smallest <= factors.min() <= factors.max() <= largest:
            break
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


def _check_supported(fields: Fields) -> None:
    if fields.text("general.architecture") != "llama":
        fields.fail("general.architecture", "must be 'llama'")
    for key, allowed in _ONLY.items():
        if key in fields and not _is_one(fields.take(key), allowed):
            fields.fail(key, f"must be {allowed[0]!r}")
    for key, value in fields.values.items():
        known = key in _ONLY or not key.startswith("llama.") or key.removeprefix("llama.") in _KNOWN
        if not known and not _is_one(value, (False, 0, 0.0, "", [])):
            fields.fail(key, "is no key of a plain Llama")


def _is_one(value: Any, choices: tuple[Any, ...]) -> bool:
    # `True == 1` holds in Python.
    return any(isinstance(value, bool) == isinstance(choice, bool) and value == choice for choice in choices)


def _rope(fields: Fields, *, head_dim: int, factors: Float[np.ndarray, "*half"] | None) -> Rope:
    if head_dim % 2:
        raise ValueError(f"{fields.source}: the head size must be even for RoPE, got {head_dim}.")
    theta = fields.number("llama.rope.freq_base", 10000.0, at_most=LARGEST_THETA)
    if not theta > 1:
        fields.fail("llama.rope.freq_base", "must be a number above 1")
    rope = Rope(head_dim=head_dim, theta=_shortest(theta))
    # Without a type llama.cpp scales linearly; `scale_linear` is the key's name in old files.
    kind = fields.choice("llama.rope.scaling.type", ("none", "linear"), "linear")
    key = "llama.rope.scaling.factor" if "llama.rope.scaling.factor" in fields else "llama.rope.scale_linear"
    factor = fields.number(key, 0.0)
    smallest, largest = FACTOR_RANGE
    if factor and not smallest <= factor <= largest:
        fields.fail(key, f"must be 0 or from {smallest:g} to {largest:g}")
    scaling = None if kind == "none" or factor in (0.0, 1.0) else LinearScaling(factor=_shortest(factor))
    if factors is not None:
        if scaling is not None:
            raise ValueError(f"{fields.source}: `{key}` is {factor!r} beside a tensor 'rope_freqs.weight'.")
        scaling = llama3_scaling_from_factors(rope, factors)
    return Rope(head_dim=head_dim, theta=rope.theta, scaling=scaling)


def _head_dim(fields: Fields, *, hidden: int, heads: int) -> int:
    if "llama.attention.key_length" not in fields and hidden % heads:
        raise ValueError(
            f"{fields.source}: `llama.embedding_length` must be a multiple of `llama.attention.head_count` where "
            f"`llama.attention.key_length` is not given, got {hidden} and {heads}."
        )
    head_dim = _size(fields, "llama.attention.key_length", "head_dim", default=hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            fields.fail(key, f"must be the head size {head_dim}")
    return head_dim


def _vocab_size(fields: Fields) -> int:
    if "llama.vocab_size" in fields:
        return _size(fields, "llama.vocab_size", "vocab_size")
    tokens = fields.take("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= LARGEST_SIZES["vocab_size"]:
        fields.fail("tokenizer.ggml.tokens", f"must be a list of 1 to {LARGEST_SIZES['vocab_size']} tokens")
    return len(tokens)


def _stop_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    keys = (f"tokenizer.ggml.{key}_token_id" for key in _STOP_KEYS)
    ids = (fields.integer(key, None, at_most=vocab_size - 1) for key in keys)
    named = (token for token in ids if token is not None)
    return tuple(dict.fromkeys([*named, *end_of_turn_ids(fields.values)]))


def _size(fields: Fields, key: str, name: str, *, default: int | None = None) -> int:
    if isinstance(fields.take(key, default), list):
        fields.fail(key, "must be one number for all layers")
    optional = () if default is None else (default,)
    return fields.integer(key, *optional, at_least=1, at_most=LARGEST_SIZES[name])


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-5, as in config.json, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
