"""Which implementation of an operation runs: by platform, or as asked for, and never another in silence."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from kvjax_kernels.devices import compute_capability, platform

#: Plain JAX that serves as the oracle, plain JAX that is fast, the Pallas kernels, and these in an interpreter.
IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu", "tpu-interpret", "gpu-interpret")

#: What callers pass on: one name for every operation, names by operation, or None to pick by platform; hashable.
Implementation = str | tuple[tuple[str, str], ...] | None

#: Why a kernel cannot do what is asked of it, or None if it can.
Obstacle = Callable[[], str | None]


class Choice(NamedTuple):
    """What runs.

    Attributes:
        backend: "reference", "xla", "tpu" or "gpu".
        interpret: whether the kernel runs in its interpreter.
    """

    backend: str
    interpret: bool = False


_recorder: contextvars.ContextVar[set[tuple[str, str]] | None] = contextvars.ContextVar("recorder", default=None)


@contextlib.contextmanager
def record() -> Iterator[set[tuple[str, str]]]:
    """Collects (operation, implementation) of every operation that is traced inside."""
    ran: set[tuple[str, str]] = set()
    token = _recorder.set(ran)
    try:
        yield ran
    finally:
        _recorder.reset(token)


def choose(operation: str, implementation: str | None, obstacles: Mapping[str, Obstacle]) -> Choice:
    """The implementation to run.

    Args:
        operation: its name, for messages and `record`.
        implementation: one of `IMPLEMENTATIONS`; None takes the kernel of the platform where there is one that can
            do this, else "xla".
        obstacles: for each backend that has a kernel, what keeps it from doing this.

    Raises:
        ValueError: an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    if implementation is None:
        here = platform()
        # Asked first: what serves no other vendor's GPU may not even be there to import.
        usable = here in obstacles and not (here == "gpu" and compute_capability() is None)
        choice = Choice(here if usable and obstacles[here]() is None else "xla")
    elif implementation not in IMPLEMENTATIONS:
        raise ValueError(f"`implementation` must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}.")
    else:
        backend, _, interpret = implementation.partition("-")
        choice = Choice(backend, bool(interpret))
        if backend in ("tpu", "gpu"):
            if backend not in obstacles:
                raise NotImplementedError(f"`{operation}` has no {backend.upper()} kernel.")
            obstacle = obstacles[backend]()
            if obstacle is not None:
                raise NotImplementedError(f"the {backend.upper()} kernel of `{operation}` cannot do this: {obstacle}.")
    ran = _recorder.get()
    if ran is not None:
        ran.add((operation, choice.backend + ("-interpret" if choice.interpret else "")))
    return choice


def implementation_of(implementation: Implementation, operation: str) -> str | None:
    """The name for one operation; None where it is not forced."""
    return dict(implementation).get(operation) if isinstance(implementation, tuple) else implementation
