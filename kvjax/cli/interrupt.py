"""Ctrl-C while JAX computes."""

import atexit
import contextlib
import os
from collections.abc import Iterator

INTERRUPTED = 130


@contextlib.contextmanager
def abandons_work_after_ctrl_c() -> Iterator[None]:
    """Lets the process end without what its body has started, if Ctrl-C interrupts that.

    Python gets the interrupt at once, but as it ends JAX would wait for the running program: for a long prompt
    that is the whole prefill.
    """
    try:
        yield
    except KeyboardInterrupt:
        # The last to be registered is the first to run, and nothing runs after it.
        atexit.register(os._exit, INTERRUPTED)
        raise
