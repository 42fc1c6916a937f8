"""Compiles before running, so that what the compiler took is free again when the program takes its own."""

import ctypes
import platform
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

#: Hashes of the programs that have been compiled.
_compiled: set[int] = set()


def run_compiled(function: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
    """`function(*arguments, **static)` of a jitted function whose keywords are static.

    On a CPU the compiler works in the memory that the program needs next, and the C library keeps what it has freed:
    0.15 GB for a model of 30 layers. A program's first run therefore compiles, has the freed memory given back to the
    system, and only then runs.
    """
    leaves, structure = jax.tree.flatten(arguments)
    if jax.default_backend() == "cpu" and not any(isinstance(leaf, Tracer) for leaf in leaves):
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        program = hash((function, structure, shapes, tuple(sorted(static.items(), key=lambda item: item[0]))))
        if program not in _compiled:
            function.lower(*arguments, **static).compile()  # pyright: ignore[reportFunctionMemberAccess]
            give_back_freed_memory()
            _compiled.add(program)
    return function(*arguments, **static)


def give_back_freed_memory() -> None:
    """Has the C library return freed memory to the system; glibc only, elsewhere nothing happens."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
