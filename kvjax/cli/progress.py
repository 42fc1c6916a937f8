"""Shows that long work is going on."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from kvjax.cli.errors import UserError


class Activity:
    """A spinner that shows, or, where stderr is no terminal, nothing."""

    def __init__(self, spinner: Any = None, task: Any = None):
        self._spinner, self._task = spinner, task

    def describe(self, message: str) -> None:
        """Shows another message."""
        if self._spinner is not None:
            self._spinner.update(self._task, description=message)

    def end(self) -> None:
        """Ends it early; harmless when called again."""
        if self._spinner is not None:
            self._spinner.stop()


@contextlib.contextmanager
def activity(message: str) -> Iterator[Activity]:
    """Shows a spinner and the elapsed time on stderr while its body runs, if stderr is a terminal.

    Nothing may be written to stdout while it shows.

    Raises:
        UserError: rich is not installed.
    """
    if not sys.stderr.isatty():
        yield Activity()
        return
    with _spinner() as spinner:
        yield Activity(spinner, spinner.add_task(message, total=None))


class Lines:
    """Lines on stderr about a long job, one every few seconds, and its last one."""

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds, self._told = seconds, 0.0

    def due(self, *, last: bool) -> bool:
        """Whether it is time for a line; if so, it counts as told."""
        now = time.monotonic()
        if now - self._told < self._seconds and not last:
            return False
        self._told = now
        return True


def note(text: str) -> None:
    """Tells the user something on stderr."""
    print(f"kvjax: {text}", file=sys.stderr, flush=True)


def _spinner() -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError as error:
        raise UserError(f'showing progress needs `pip install "kvjax[cli]"` ({error}).') from error
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
    )
