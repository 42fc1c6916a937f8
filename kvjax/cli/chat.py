"""`kvjax generate --chat`: turns from stdin, answers over one growing cache."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from kvjax.cli.conversation import Answer
from kvjax.cli.errors import UserError
from kvjax.cli.prompt_source import decoded


def chat(first: str | None, answer: Callable[[str], Answer], *, note: Callable[[str], None]) -> int:
    """Talks until stdin ends or says /exit.

    Args:
        first: the first turn, or None to read that too.
        answer: answers a turn, and shows it.
        note: is told what the user should know.
    """
    if first is not None:
        _answer(first, answer, note=note)
    for turn in _turns():
        _answer(turn, answer, note=note)
    return 0


def _answer(turn: str, answer: Callable[[str], Answer], *, note: Callable[[str], None]) -> None:
    try:
        answer(turn)
    except KeyboardInterrupt:
        if not _at_terminal():
            raise
        print(flush=True)
        note("stopped, and this turn forgotten; Ctrl-C again or Ctrl-D leaves")


def _turns() -> Iterator[str]:
    """What the user says, without empty lines, up to /exit or the end."""
    at_terminal = _at_terminal()
    if at_terminal:
        with contextlib.suppress(ImportError):  # Windows has none; lines can be edited without.
            import readline  # noqa: F401
    while True:
        turn = _typed_line() if at_terminal else _piped_line()
        if turn is None or turn.strip() == "/exit":
            return
        if turn.strip():
            yield turn


def _at_terminal() -> bool:
    return sys.stdin.isatty()


def _typed_line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        print(flush=True)
        return None
    except UnicodeDecodeError as error:
        raise UserError(f"what was typed is not text in this terminal's encoding: {error}.") from error


def _piped_line() -> str | None:
    line = sys.stdin.buffer.readline()
    return decoded(line, "stdin") if line else None
