"""Reads and writes Hugging Face's config.json for Llama and Mistral models.

Whatever would change the model's arithmetic and is not supported is an error, never skipped.
"""

from collections.abc import Mapping
from typing import Any

from kvjax_models.config import LlamaConfig
from kvjax_models.hugging_face_rope import rope_fields, rope_from_hugging_face

# Field: the only values under which the model is the plain Llama that is built here.
_ONLY = {
    "hidden_act": ("silu",),
    "sliding_window": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}


def config_from_hugging_face(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> LlamaConfig:
    """Builds the configuration that a checkpoint's JSON files describe.

    Args:
        fields: the content of config.json, as written by transformers 4 (`rope_theta`, `rope_scaling`) or
            5 (`rope_parameters`).
        generation: the content of generation_config.json; its `eos_token_id` wins.

    Raises:
        ValueError: a field is missing, wrong or not supported; the message names it and its value.
    """
    _check_supported(fields)
    hidden, heads = _required(fields, "hidden_size"), _required(fields, "num_attention_heads")
    head_dim = _value(fields, "head_dim", None)
    if head_dim is None:
        if hidden % heads:
            raise ValueError(
                "`hidden_size` must be a multiple of `num_attention_heads` where `head_dim` is not given, "
                f"got {hidden} and {heads}."
            )
        head_dim = hidden // heads
    # Mistral's key/value heads default to 8 and Llama's to all of them: ask, rather than know both.
    mistral = fields["model_type"] == "mistral"
    kv_heads = _required(fields, "num_key_value_heads") if mistral else fields.get("num_key_value_heads")
    return LlamaConfig(
        vocab_size=_required(fields, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_required(fields, "intermediate_size"),
        num_hidden_layers=_required(fields, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_required(fields, "max_position_embeddings"),
        rms_norm_eps=float(_required(fields, "rms_norm_eps")),
        rope=rope_from_hugging_face(fields, head_dim=head_dim),
        tie_word_embeddings=_flag(fields, "tie_word_embeddings"),
        attention_bias=_flag(fields, "attention_bias"),
        mlp_bias=_flag(fields, "mlp_bias"),
        eos_token_ids=_eos_token_ids(fields, generation or {}),
        bos_token_id=fields.get("bos_token_id"),
    )


def config_to_hugging_face(config: LlamaConfig) -> dict[str, Any]:
    """The config.json that `config_from_hugging_face` reads back as `config`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_fields(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
    }


def _check_supported(fields: Mapping[str, Any]) -> None:
    model_type = _required(fields, "model_type")
    if model_type not in _ARCHITECTURES:
        raise ValueError(f"`model_type` must be one of {list(_ARCHITECTURES)}, got {model_type!r}.")
    architectures = fields.get("architectures") or [_ARCHITECTURES[model_type]]
    if architectures != [_ARCHITECTURES[model_type]]:
        raise ValueError(f"`architectures` must be {[_ARCHITECTURES[model_type]]}, got {architectures!r}.")
    if model_type == "mistral":
        # Absent means 4096 to transformers; and Mistral's code ignores the bias switches.
        fields = {"sliding_window": 4096, **fields}
        for name in ("attention_bias", "mlp_bias"):
            if fields.get(name):
                raise ValueError(f"`{name}` must be false in a Mistral model, got {fields[name]!r}.")
    for name, allowed in _ONLY.items():
        if fields.get(name, allowed[0]) not in allowed:
            raise ValueError(f"`{name}` must be {allowed[0]!r}, got {fields[name]!r}: not supported.")
    other_layers = set(fields.get("layer_types") or ()) - {"full_attention"}
    if other_layers:
        raise ValueError(f"`layer_types` must all be 'full_attention', got {sorted(other_layers)}.")


def _eos_token_ids(fields: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = fields.get("eos_token_id")
    if ids is None:
        return ()
    ids = (ids,) if isinstance(ids, int) else tuple(ids)
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise ValueError(f"`eos_token_id` must be a token id or a list of them, got {ids!r}.")
    return ids


def _required(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"`{name}` is missing.")
    return _value(fields, name, None)


def _value(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    value = fields.get(name, default)
    if name not in ("model_type", "rms_norm_eps") and value is not None and type(value) is not int:
        raise ValueError(f"`{name}` must be an integer, got {value!r}.")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be true or false, got {value!r}.")
    return value
