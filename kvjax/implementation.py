"""Which kernels are to run, and which did."""

import dataclasses
from collections.abc import Mapping

import jax

from kvjax_kernels.devices import platform
from kvjax_kernels.dispatch import IMPLEMENTATIONS, Implementation

#: Operations whose implementation can be forced one by one.
OPERATIONS = (
    "prefill_attention",
    "extend_attention",
    "ragged_decode_attention",
    "pooled_attention",
    "select_highest",
    "column_sums",
    "compact",
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Ran:
    """What a compiled program runs; static, so that a program that is compiled already still tells.

    Attributes:
        operations: pairs of an operation and its implementation, sorted.
    """

    operations: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, recorded: set[tuple[str, str]]) -> "Ran":
        """What `kvjax_kernels.dispatch.record` collected."""
        return cls(tuple(sorted(recorded)))


def check_implementation(implementation: object) -> Implementation:
    """An `implementation` argument in its hashable form.

    Raises:
        ValueError: unknown operations or implementations.
        NotImplementedError: kernels of a platform that this process does not compute on.
    """
    if implementation is None:
        return None
    pairs = implementation.items() if isinstance(implementation, Mapping) else [("", implementation)]
    for operation, name in pairs:
        if operation and operation not in OPERATIONS:
            raise ValueError(f"`implementation` knows the operations {', '.join(OPERATIONS)}, got {operation!r}.")
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"`implementation` must be one of {', '.join(IMPLEMENTATIONS)}, got {name!r}.")
        here = platform()
        if name in ("tpu", "gpu") and name != here:
            raise NotImplementedError(
                f"`implementation={name!r}` needs a {str(name).upper()}, and JAX computes on {here} here; "
                f"{name + '-interpret'!r} runs the kernels in an interpreter."
            )
    if isinstance(implementation, Mapping):
        return tuple(sorted(implementation.items()))
    assert isinstance(implementation, str)
    return implementation
