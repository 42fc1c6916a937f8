"""Where the prompt comes from: an argument, a file, stdin, or a needle in a haystack."""

import argparse
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvjax.allocation import check_count
from kvjax.cli.errors import UserError

if TYPE_CHECKING:
    from kvjax.evaluation.needle import Needle
    from kvjax.prompts import Tokenizer


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the prompt and its other sources."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="The prompt; - reads it from stdin.")
    parser.add_argument(
        "--file", metavar="PATH", help="Reads the prompt from a UTF-8 text file, less a line end at its end."
    )
    parser.add_argument(
        "--needle",
        type=int,
        metavar="N",
        help="Makes a prompt of about N tokens that hides a number, and tells what becomes of the number.",
    )
    parser.add_argument(
        "--depth",
        type=float,
        metavar="X",
        help="Where --needle hides the number: 0 is the start, 1 the end. The default is 0.5.",
    )


def check_sources(args: argparse.Namespace) -> None:
    """Raises a UserError unless there is one prompt; with --chat there may be none."""
    given = [
        name
        for name, value in (("PROMPT", args.prompt), ("--file", args.file), ("--needle", args.needle))
        if value is not None
    ]
    if len(given) > 1:
        raise UserError(f"give one prompt only, got {' and '.join(given)}.")
    may_chat, chat = hasattr(args, "chat"), getattr(args, "chat", False)
    if not given and not chat:
        others = " (or --chat)" if may_chat else ""
        raise UserError(f"give a prompt: PROMPT, - for stdin, --file PATH or --needle N{others}.")
    if args.depth is not None and args.needle is None:
        raise UserError("--depth is where --needle hides its number; give --needle N too.")
    if args.depth is not None and not 0.0 <= args.depth <= 1.0:
        raise ValueError(f"`depth` must be from 0 to 1, got {args.depth}.")
    if args.needle is not None:
        check_count("tokens", args.needle, at_least=1)
    if chat and args.prompt == "-":
        raise UserError("--chat reads its turns from stdin already; leave out the -.")


def prompt_text(args: argparse.Namespace) -> str | None:
    """The prompt's text; None where it comes from --needle, or --chat begins without one.

    Raises:
        UserError: it is empty, or not UTF-8.
        OSError: the file cannot be read.
    """
    if args.prompt == "-":
        text = decoded(sys.stdin.buffer.read(), "stdin")
    elif args.file is not None:
        text = decoded(pathlib.Path(args.file).expanduser().read_bytes(), args.file)
    elif args.prompt is not None:
        # Python keeps arguments that are not UTF-8 as surrogates.
        text = decoded(args.prompt.encode("utf-8", "surrogateescape"), "PROMPT")
    else:
        return None
    if not text.strip():
        raise UserError("the prompt is empty.")
    return text


def hide_needle(args: argparse.Namespace, tokenizer: "Tokenizer", *, note: Callable[[str], None]) -> "Needle":
    """The prompt that --needle asks for.

    Args:
        args: with needle, depth and seed.
        tokenizer: counts its tokens.
        note: is told where the number is.

    Raises:
        ValueError: see `kvjax.evaluation.needle`.
    """
    from kvjax.evaluation.needle import needle

    depth = 0.5 if args.depth is None else args.depth
    hidden = needle(tokenizer, tokens=args.needle, depth=depth, seed=args.seed)
    note(f"the number {hidden.answer} is hidden at depth {depth:g} of about {args.needle} tokens")
    return hidden


def decoded(content: bytes, source: str) -> str:
    """UTF-8 text, less a line end at its end.

    Raises:
        UserError: it is not UTF-8.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source} is not UTF-8 text: its byte {error.start} is 0x{content[error.start]:02x}."
        ) from error
    return text.removesuffix("\n").removesuffix("\r")
