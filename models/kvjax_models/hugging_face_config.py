"""Reads and writes Hugging Face's config.json for Llama and Mistral models.

Whatever would change the model's arithmetic and is not supported is an error, never skipped.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from kvjax.fields import Fields
from kvjax.files import read_json, reading
from kvjax_models.config import EPSILON_RANGE, LARGEST_SIZES, LlamaConfig
from kvjax_models.hugging_face_fields import check_plain_llama
from kvjax_models.hugging_face_rope import rope_fields, rope_from_hugging_face

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}


def read_hugging_face_config(file: pathlib.Path) -> LlamaConfig:
    """Reads a config.json, and the generation_config.json beside it where there is one.

    Raises:
        ValueError: a file is damaged, or the model is not supported; the message names file and field.
    """
    generation = file.parent / GENERATION_FILE
    settings = read_json(generation) if generation.exists() else {}
    with reading(file, what="the configuration of a Llama that is supported"):
        return config_from_hugging_face(read_json(file), settings, source=file, generation_source=generation)


def config_from_hugging_face(
    fields: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    source: str | pathlib.Path = CONFIG_FILE,
    generation_source: str | pathlib.Path = GENERATION_FILE,
) -> LlamaConfig:
    """Builds the configuration that a checkpoint's JSON files describe.

    Args:
        fields: the content of config.json, as written by transformers 4 (`rope_theta`, `rope_scaling`) or
            5 (`rope_parameters`).
        generation: the content of generation_config.json; its `eos_token_id` wins.
        source: the file that `fields` come from, for messages.
        generation_source: the file that `generation` comes from.

    Raises:
        ValueError: a field is missing, wrong or not supported; the message names it and its value.
    """
    config, settings = Fields(fields, source=source), Fields(generation or {}, source=generation_source)
    mistral = _check_model(config)
    sizes = _sizes(config, mistral=mistral)
    smallest, largest = EPSILON_RANGE
    return LlamaConfig(
        **sizes,
        rms_norm_eps=config.number("rms_norm_eps", at_least=smallest, at_most=largest),
        rope=rope_from_hugging_face(config, head_dim=sizes["head_dim"]),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        eos_token_ids=_eos_token_ids(settings if "eos_token_id" in settings else config, sizes["vocab_size"]),
        bos_token_id=config.integer("bos_token_id", None, at_most=sizes["vocab_size"] - 1),
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


def _check_model(fields: Fields) -> bool:
    """Checks that the model is one of those that are built here; whether it is a Mistral."""
    model_type = fields.choice("model_type", tuple(_ARCHITECTURES))
    if fields.take("architectures", []) not in ([], [_ARCHITECTURES[model_type]]):
        fields.fail("architectures", f"must be {[_ARCHITECTURES[model_type]]}")
    mistral = model_type == "mistral"
    if mistral:
        # Absent means 4096 to transformers; and Mistral's code ignores the bias switches.
        fields = Fields({"sliding_window": 4096, **fields.values}, source=fields.source)
        for name in ("attention_bias", "mlp_bias"):
            if fields.flag(name, False):
                fields.fail(name, "must be false in a Mistral model")
    check_plain_llama(fields)
    return mistral


def _sizes(fields: Fields, *, mistral: bool) -> dict[str, int]:
    def size(name: str, *default: Any) -> Any:
        return fields.integer(name, *default, at_least=1, at_most=LARGEST_SIZES[name])

    # Mistral's key/value heads default to 8 and Llama's to all of them: ask, rather than know both.
    optional = ("head_dim",) if mistral else ("head_dim", "num_key_value_heads")
    sizes = {name: size(name, None) if name in optional else size(name) for name in LARGEST_SIZES}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if sizes["head_dim"] is None:
        if hidden % heads:
            raise ValueError(
                f"{fields.source}: `hidden_size` must be a multiple of `num_attention_heads` where `head_dim` is not "
                f"given, got {hidden} and {heads}."
            )
        sizes["head_dim"] = hidden // heads
    if sizes["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = heads
    return sizes


def _eos_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = fields.take("eos_token_id", [])
    for token in ids if isinstance(ids, list) else [ids]:
        if type(token) is not int:
            fields.fail("eos_token_id", "must be a token id or a list of them")
        if not 0 <= token < vocab_size:
            fields.fail("eos_token_id", f"must be in the vocabulary of {vocab_size} tokens")
    return tuple(dict.fromkeys(ids)) if isinstance(ids, list) else (ids,)
