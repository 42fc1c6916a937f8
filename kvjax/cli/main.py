"""The command's entry: arguments in, exit code out."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import kvjax
from kvjax.cli import duo, evaluate, generate, inspect, models, plan
from kvjax.cli.errors import MENDABLE, Parser, UserError, sentence
from kvjax.cli.help_texts import EXAMPLES, Formatter
from kvjax.cli.interrupt import INTERRUPTED

_WRONG, _PIPE_CLOSED = 2, 141
_WARNINGS = (kvjax.LongContextWarning, kvjax.NonFiniteWarning, kvjax.RereadWarning)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; those of the process by default.

    Returns:
        The exit code: 0, 2 for what the user got wrong, 130 after Ctrl-C, 141 where nobody reads the output.
    """
    _replace_what_cannot_be_shown()
    spellings: Mapping[str, str] = {}
    try:
        args = _parser().parse_args(argv)
        spellings = args.spellings
        with _warnings_on_one_line():
            code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        _let_python_close_stdout()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (UserError, *MENDABLE) as error:
        print(f"kvjax: error: {sentence(error, spellings)}", file=sys.stderr)
        return _WRONG
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="kvjax",
        description="Runs language models with a compressed KV cache, in JAX.",
        epilog=EXAMPLES["kvjax"],
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}", help="Prints the version.")
    subcommands = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    generate.add_subcommand(subcommands)
    inspect.add_subcommand(subcommands)
    duo.add_subcommand(subcommands)
    plan.add_subcommand(subcommands)
    evaluate.add_subcommand(subcommands)
    models.add_subcommand(subcommands)
    return parser


@contextlib.contextmanager
def _warnings_on_one_line() -> Iterator[None]:
    """Shows kvjax's warnings as the command's own; others as Python does."""
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> None:
        if category.__module__.startswith("kvjax"):
            print(f"kvjax: warning: {message}", file=sys.stderr)
        else:
            show_others(message, category, *place, **line)

    with warnings.catch_warnings():
        for category in _WARNINGS:
            warnings.simplefilter("always", category)
        warnings.showwarning = show
        yield


def _replace_what_cannot_be_shown() -> None:
    """A model writes any character; a terminal that lacks some shows "?" for them."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def _let_python_close_stdout() -> None:
    """Python flushes stdout once more as it ends, which would raise again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
