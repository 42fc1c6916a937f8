"""`kvjax plan`: what each policy costs on a device, before anything runs."""

import argparse
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

import kvjax
from kvjax.allocation import check_budget, check_count
from kvjax.cli.errors import UserError
from kvjax.cli.help_texts import EXAMPLES, Formatter
from kvjax.cli.loading import prepare_jax
from kvjax.cli.options import SPELLINGS
from kvjax.cli.options import budget as budget_type
from kvjax.cli.plan_report import json_plan, text_plan
from kvjax.cli.planned_model import read_config
from kvjax.cli.policies import POLICIES, make_policy
from kvjax.cli.progress import activity
from kvjax.prompts import check_new_tokens

if TYPE_CHECKING:
    from kvjax.memory import Accelerator

_DEVICE = "h100-80gb"
_PLANNED = ("full", "streaming-llm", "h2o", "tova", "snapkv", "pyramidkv", "ada-kv", "duo")
_FEWEST, _SHARE = 64, 8
_GB = 1e9
#: GB: what JAX itself holds is more, and no computer has its inverse.
_FINEST = 1e-6


def add_subcommand(subcommands: Any) -> None:
    """Adds `plan` to the command."""
    parser = subcommands.add_parser(
        "plan",
        help="Tells what each policy would cost, before anything runs.",
        description="Computes, from a model's configuration alone, the bytes of each policy's cache, the rows that fit "
        "a device,\nand the speed of decoding that its memory's bandwidth allows; and recommends one for each kind of "
        "work.",
        epilog=EXAMPLES["plan"],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    _add_work_arguments(parser)
    _add_device_arguments(parser)
    _add_policy_arguments(parser)
    parser.add_argument("--json", action="store_true", help="Prints one JSON object instead of the table.")
    spellings = {"context": "--context", "batch": "--batch", "devices": "--devices", "sparsity": "--sparsity"}
    parser.set_defaults(run=run, spellings={**SPELLINGS, **spellings})


def _add_work_arguments(parser: argparse.ArgumentParser) -> None:
    floats = ("float32", "bfloat16")
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="A well-known model such as llama-3.1-8b, a config.json or a folder with one, a checkpoint, or a name on "
        "the Hugging Face hub.",
    )
    parser.add_argument("--context", type=int, required=True, metavar="N", help="Tokens of each row's prompt.")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="Rows. The default is 1.")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="Room for the answer. The default is 256."
    )
    parser.add_argument("--dtype", choices=floats, default="bfloat16", help="Of the parameters; bfloat16 by default.")
    parser.add_argument("--cache-dtype", choices=floats, help="Of cached keys and values. The default is --dtype.")


def _add_device_arguments(parser: argparse.ArgumentParser) -> None:
    from kvjax.memory import ACCELERATORS

    group = parser.add_argument_group("device")
    group.add_argument("--device", metavar="NAME", help=f"One of {', '.join(ACCELERATORS)}. The default is {_DEVICE}.")
    group.add_argument("--memory", type=float, metavar="GB", help="Of one device, in 1e9 bytes; also of another kind.")
    group.add_argument("--bandwidth", type=float, metavar="GB/S", help="Of its memory, in 1e9 bytes a second.")
    group.add_argument(
        "--devices", type=int, default=1, metavar="N", help="How many split the heads among them. The default is 1."
    )


def _add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help=f"One of {', '.join(POLICIES)}. May be given several times. The default is all with figures of their own.",
    )
    group.add_argument(
        "--budget",
        type=budget_type,
        metavar="BUDGET",
        help="How many tokens each KV head keeps (256), or which fraction of the prompt (0.25). The default is an "
        f"eighth of the context, and {_FEWEST} at least.",
    )
    group.add_argument(
        "--sparsity",
        type=float,
        default=0.5,
        metavar="X",
        help="The share of heads that keep only sinks and recent tokens under duo. The default is 0.5.",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `kvjax plan`."""
    from kvjax.memory import Deployment, plan, recommend

    accelerator = _accelerator(args)
    _check(args)
    prepare_jax()
    with activity(f"Planning {args.model}"):
        from kvjax_models import model_size, model_spec

        config = read_config(args.model)
        deployment = Deployment(
            model=model_spec(config, args.dtype),
            size=model_size(config, args.dtype),
            accelerator=accelerator,
            context=args.context,
            devices=args.devices,
            batch=args.batch,
            max_new_tokens=args.max_new_tokens,
            cache_dtype=args.cache_dtype,
        )
        # A policy that is named twice is planned once.
        names: list[str] = list(dict.fromkeys(args.policy or _PLANNED))
        plans = plan([_policy(name, deployment.model, args) for name in names], deployment)
        named = dict(zip(names, plans, strict=True))
        recommendations = recommend(plans)
    _warn_if_long(deployment.model, args)
    if args.json:
        print(json_plan(named, recommendations, model=args.model))
    else:
        print("\n".join(text_plan(named, recommendations, model=args.model)))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises for what no model could have, before a configuration is read or fetched."""
    check_count("context", args.context, at_least=1)
    check_count("batch", args.batch, at_least=1, unit="row")
    check_count("devices", args.devices, at_least=1, unit="device")
    check_new_tokens(args.max_new_tokens)
    if args.budget is not None:
        check_budget(args.budget)
    for name in args.policy or ():
        if name not in POLICIES:
            raise UserError(f"--policy must be one of {', '.join(POLICIES)}; got {name!r}.")
    kvjax.DuoAttention(sparsity=args.sparsity)


def _accelerator(args: argparse.Namespace) -> "Accelerator":
    from kvjax.memory import ACCELERATORS, Accelerator

    given = {"memory": args.memory, "bandwidth": args.bandwidth}
    for name, value in given.items():
        if value is not None and not _FINEST <= value <= 1 / _FINEST:
            raise UserError(
                f"--{name} must be a positive number of GB, from {_FINEST} to {1 / _FINEST:g}, got {value}."
            )
    own: dict[str, Any] = {}
    if args.memory is not None:
        own["memory_bytes"] = round(args.memory * _GB)
    if args.bandwidth is not None:
        own["bandwidth"] = args.bandwidth * _GB
    if args.device is None and len(own) == 1:
        raise UserError("--memory and --bandwidth go together where no --device is given.")
    if args.device is None and own:
        return Accelerator(name="device", **own)
    name = (args.device or _DEVICE).lower()
    if name not in ACCELERATORS:
        raise UserError(
            f"--device must be one of {', '.join(ACCELERATORS)}, got {args.device!r}; of another, give --memory and "
            "--bandwidth."
        )
    return dataclasses.replace(ACCELERATORS[name], **own)


def _policy(name: str, model: kvjax.ModelSpec, args: argparse.Namespace) -> kvjax.Policy:
    if name == "duo":
        # How many heads stream is what costs, not which.
        pattern = kvjax.HeadPattern.of([[0.0] * model.num_kv_heads] * model.num_layers)
        return kvjax.DuoAttention(pattern=pattern, sparsity=args.sparsity)
    default = min(args.context, max(args.context // _SHARE, _FEWEST))
    budget = default if args.budget is None else args.budget
    return make_policy(name, budget=None if name == "full" else budget, settings=())


def _warn_if_long(model: kvjax.ModelSpec, args: argparse.Namespace) -> None:
    total = args.context + args.max_new_tokens
    if total > model.max_positions:
        warnings.warn(
            f"{args.context:,} tokens and {args.max_new_tokens:,} new ones are more than the {model.max_positions:,} "
            "that the model was trained for: the figures hold, its answers may not.",
            kvjax.LongContextWarning,
            stacklevel=2,
        )
