"""Which device computes: asked of the arguments where they are arrays, else of JAX's settings."""

import re
from typing import Any

import jax
from jax.core import Tracer


def platform(*arguments: Any) -> str:
    """Names the platform that computes on `arguments`: "cpu", "gpu" or "tpu".

    Tracers and shapes lie nowhere yet: they are computed on where JAX computes by default.
    """
    found = _chosen(arguments)
    if found is None:
        return jax.default_backend()
    return found if isinstance(found, str) else found.platform


def device(*arguments: Any) -> Any:
    """Returns the device that computes on `arguments`, see `platform`."""
    found = _chosen(arguments)
    return jax.local_devices(backend=found)[0] if found is None or isinstance(found, str) else found


def compute_capability(*arguments: Any) -> tuple[int, int] | None:
    """Returns the compute capability of the NVIDIA GPU that computes on `arguments`; None of any other device."""
    # Of an AMD GPU JAX gives an architecture's name here, such as "gfx942".
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device(*arguments), "compute_capability", "")))
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def missing_nvidia_gpu(*arguments: Any, least: tuple[int, int] | None = None, only: bool = False) -> str | None:
    """Says why code for NVIDIA GPUs cannot run on the GPU that computes on `arguments`; None if it can.

    Where there is no GPU, nothing keeps the code from being compiled for another machine's.

    Args:
        arguments: see `platform`.
        least: the compute capability that it needs; None for any.
        only: whether it needs just this generation, the same first number.
    """
    if platform(*arguments) != "gpu":
        return None
    capability, needed = compute_capability(*arguments), ""
    fits = capability is not None
    if least is not None:
        needed = f" of compute capability {least[0]}.{least[1]}" + ("" if only else " or more")
        fits = capability is not None and least <= capability < ((least[0] + 1, 0) if only else (99, 0))
    this = getattr(device(*arguments), "compute_capability", "none")
    return None if fits else f"it needs an NVIDIA GPU{needed}, this one has {this}"


def _chosen(arguments: Any) -> Any:
    """The device of the first array, else JAX's default device or its platform's name, else None."""
    for argument in jax.tree.leaves(arguments):
        if isinstance(argument, jax.Array) and not isinstance(argument, Tracer):
            return next(iter(argument.devices()))
    return jax.config.jax_default_device
