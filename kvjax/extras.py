"""Optional dependencies: imported where they are used, with an error that says what to install."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def extra(name: str, *, purpose: str) -> Iterator[None]:
    """Turns a failed import in its body into one that names the extra of kvjax to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f'{purpose} needs `pip install "kvjax[{name}]"` ({error}).') from error
