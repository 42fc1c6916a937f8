"""Which implementation of an operation runs: by platform, or as asked for, and never another in silence."""

import contextlib
import contextvars
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from kvjax_kernels.devices import missing_nvidia_gpu, platform

#: Plain JAX that serves as the oracle, plain JAX that is fast, the Pallas kernels, and these in an interpreter.
IMPLEMENTATIONS = ("reference", "xla", "tpu", "gpu", "tpu-interpret", "gpu-interpret")

#: What callers pass on: one name for every operation, names by operation, or None to pick by platform; hashable.
Implementation = str | tuple[tuple[str, str], ...] | None

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


def implementation_of(implementation: Implementation, operation: str) -> str | None:
    """The name for one operation; None where it is not forced."""
    return dict(implementation).get(operation) if isinstance(implementation, tuple) else implementation


def run(operation: str, implementation: str | None, *arrays: Any, **settings: Any) -> Any:
    """Runs an operation by the module of its folder that is named for the backend, imported only here.

    Such a module has `run(*arrays, **settings)`. That of a kernel, "tpu" or "gpu", takes `interpret` too, and has
    `unsupported_reason` with the same arguments: why it cannot do this, or None if it can.

    Args:
        operation: its name, and its folder's.
        implementation: one of `IMPLEMENTATIONS`; None takes the kernel of the platform where there is one that can
            do this, else "xla".
        arrays: its arrays, which tell the platform where they are concrete; integers become int32.
        settings: its other arguments.

    Raises:
        ValueError: an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"`implementation` must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}.")
    arrays, settings = jax.tree.map(_in_32_bits, (arrays, settings))
    name = implementation or platform(*arrays)
    backend, _, interpret = name.partition("-")
    if backend in ("tpu", "gpu"):
        kernel_settings = settings | {"interpret": bool(interpret)}
        reason = _unsupported_reason(operation, backend, arrays, kernel_settings)
        if reason is None:
            settings = kernel_settings
        elif implementation is None:
            name = backend = "xla"
        else:
            raise NotImplementedError(reason)
    elif implementation is None:
        name = backend = "xla"
    ran = _recorder.get()
    if ran is not None:
        ran.add((operation, name))
    module = importlib.import_module(f"kvjax_kernels.{operation}.{backend}")
    # Pallas mixes what it counts with integers of 64 bits, where there are any.
    with jax.enable_x64(False) if backend in ("tpu", "gpu") else contextlib.nullcontext():
        return module.run(*arrays, **settings)


def _unsupported_reason(operation: str, backend: str, arrays: Any, settings: dict[str, Any]) -> str | None:
    """Why a kernel cannot do this, in a sentence; None if it can."""
    module = f"kvjax_kernels.{operation}.{backend}"
    if importlib.util.find_spec(module) is None:
        return f"`{operation}` has no {backend.upper()} kernel."
    reason = None
    if backend == "gpu" and not settings["interpret"]:
        # Asked first: what serves no other vendor's GPU may not even be there to import.
        reason = missing_nvidia_gpu(*arrays)
    reason = reason or importlib.import_module(module).unsupported_reason(*arrays, **settings)
    return reason and f"the {backend.upper()} kernel of `{operation}` cannot do this: {reason}."


def _in_32_bits(value: Any) -> Any:
    """Integers as kernels take them: under `jax_enable_x64` a caller's may have 64 bits."""
    wide = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.integer) and value.dtype != jnp.int32
    return value.astype(jnp.int32) if wide else value
