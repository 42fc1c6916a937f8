"""`kvjax duo show`: a head pattern as text and as a picture."""

import argparse
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import kvjax
from kvjax.cli.help_texts import EXAMPLES, Formatter
from kvjax.cli.pictures import PICTURES, check_picture
from kvjax.fields import Fields
from kvjax.files import newest_file, read_json
from kvjax.pattern_plots import head_pattern_map

_SPARSITIES = (0.25, 0.5, 0.75)
_BAR = " ▁▂▃▄▅▆▇█"


def add_subcommand(subcommands: Any) -> None:
    """Adds `show` to `kvjax duo`."""
    parser = subcommands.add_parser(
        "show",
        help="Shows a head pattern.",
        description="Shows a pattern that `kvjax duo identify` wrote, or a published one: the alpha of every layer "
        "and KV head,\nand where each sparsity cuts. With --out also as a picture, with a histogram.",
        epilog=EXAMPLES["duo show"],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("pattern", type=pathlib.Path, metavar="DIR", help="The pattern's folder.")
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="PATH", help=f"Where a picture goes: {', '.join(PICTURES)}."
    )
    parser.set_defaults(run=run, spellings={"out": "--out"})


def run(args: argparse.Namespace) -> int:
    """Runs `kvjax duo show`."""
    if args.out is not None:
        check_picture(args.out)
    pattern = kvjax.HeadPattern.load(args.pattern)
    training = _training(newest_file(args.pattern, "training.json"))
    print("\n".join([*_heads(pattern), "", *_cuts(pattern), *training]))
    if args.out is not None:
        head_pattern_map(pattern, title=f"Which heads retrieve: {args.pattern.name}").savefig(args.out)
        print(f"kvjax: wrote {args.out}", file=sys.stderr, flush=True)
    return 0


def _heads(pattern: kvjax.HeadPattern) -> Iterator[str]:
    """A line a layer: a bar and a number for each head."""
    for layer, row in enumerate(pattern.scores):
        bars = "".join(_BAR[round(score * (len(_BAR) - 1))] for score in row)
        yield f"layer {layer:3d}  |{bars}|  {'  '.join(f'{score:.3f}' for score in row)}"


def _cuts(pattern: kvjax.HeadPattern) -> Iterator[str]:
    scores = np.asarray(pattern.scores)
    layers, heads = scores.shape
    yield f"{layers} layers of {heads} KV heads; mean alpha {scores.mean():.3f}, {(scores > 0.5).mean():.0%} over 0.5"
    if pattern.sinks is not None and pattern.recent is not None:
        yield f"learned with {pattern.sinks} sinks and {pattern.recent} recent tokens"
    for sparsity in _SPARSITIES:
        streaming = np.asarray(pattern.streaming_heads(sparsity=sparsity))
        if streaming.any():
            highest = scores[streaming].max()
            yield f"sparsity {sparsity}: {streaming.sum()} heads stream, those with an alpha up to {highest:.3f}"


def _training(file: pathlib.Path) -> Iterator[str]:
    """What `kvjax duo identify` noted of the training, where it did."""
    if not file.exists():
        return
    about = Fields(read_json(file), source=f"{file} is not what `kvjax duo identify` writes")
    recipe = ", ".join(f"{name} {value}" for name, value in about.nested("recipe").values.items())
    yield f"learned in {about.number('seconds', at_least=0.0):.0f} s: {recipe}"
