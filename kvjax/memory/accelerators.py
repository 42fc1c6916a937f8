"""Accelerators: how much they hold, and how fast they read it."""

import dataclasses
from types import MappingProxyType
from typing import Literal

_GB = 1_000_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device.

    Attributes:
        name: what to call it.
        memory_bytes: of its main memory.
        bandwidth: bytes a second that it reads from there, by its maker.
        backend: which of kvjax's decoding kernels runs there: "tpu", "gpu", or "xla" where there is none.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    backend: Literal["tpu", "gpu", "xla"] = "xla"

    def __post_init__(self) -> None:
        if not self.memory_bytes > 0:
            raise ValueError(f"`memory_bytes` must be positive, got {self.memory_bytes}.")
        if not self.bandwidth > 0:
            raise ValueError(f"`bandwidth` must be positive, got {self.bandwidth}.")
        if self.backend not in ("tpu", "gpu", "xla"):
            raise ValueError(f'`backend` must be "tpu", "gpu" or "xla", got {self.backend!r}.')


def _known(name: str, memory: int, bandwidth: int, backend: Literal["tpu", "gpu", "xla"]) -> Accelerator:
    """From GB and GB a second."""
    return Accelerator(name=name, memory_bytes=memory * _GB, bandwidth=float(bandwidth * _GB), backend=backend)


#: By name. Figures are the makers': Google Cloud's pages of system architecture for TPUs, NVIDIA's data sheets for
#: GPUs (the SXM forms of A100, H100 and H200). GB are 1e9 bytes, also where a maker means 2^30 of them; what the
#: system keeps for itself comes out of the difference. Kernels for GPUs need Hopper or newer.
ACCELERATORS = MappingProxyType(
    {
        accelerator.name: accelerator
        for accelerator in (
            _known("v5e", 16, 819, "tpu"),
            _known("v6e", 32, 1640, "tpu"),
            _known("v5p", 95, 2765, "tpu"),
            _known("h100-80gb", 80, 3352, "gpu"),
            _known("h200", 141, 4800, "gpu"),
            _known("a100-40gb", 40, 1555, "xla"),
            _known("a100-80gb", 80, 2039, "xla"),
            _known("l4", 24, 300, "xla"),
        )
    }
)
