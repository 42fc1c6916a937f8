"""PyramidKV: SnapKV's choice, with more for the lower layers."""

import dataclasses
from typing import Literal

from kvjax.allocation import Allocation, Pyramid, from_compression_ratio
from kvjax.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV whose budget falls from the first layer to the last; `budget` is the mean of the layers.

    Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" (arXiv
    2406.02069). Differs from the authors' code: the total over all layers is exact to the token, where their
    integer arithmetic overshoots by 4 to 12 % at small budgets. For the other settings see `SnapKV`.

    Attributes:
        allocation: `Pyramid(beta=20)`; its `schedule` and `variant` choose others.
    """

    allocation: Allocation = Pyramid()  # noqa: RUF009 (frozen, so it may be shared)

    @classmethod
    def with_schedule(
        cls, *, budget: int | float, beta: float = 20, schedule: Literal["linear", "geometric"] = "linear"
    ) -> "PyramidKV":
        """The default settings with another pyramid."""
        return cls(budget=budget, allocation=Pyramid(beta=beta, schedule=schedule))

    @classmethod
    def paper(cls, *, budget: int | float) -> "PyramidKV":
        """The article's settings: SnapKV's with a window of 8 and beta 20, no sinks of their own."""
        return cls(budget=budget, sinks=0, window=8)

    @classmethod
    def authors(cls, *, budget: int | float) -> "PyramidKV":
        """The authors' code: its integer arithmetic, window 8, average pooling over 5."""
        allocation = Pyramid(variant="authors")
        return cls(budget=budget, sinks=0, window=8, kernel=5, pooling="avg", allocation=allocation)

    @classmethod
    def kvpress(
        cls, *, compression_ratio: float, window_size: int = 64, kernel_size: int = 5, beta: float = 20
    ) -> "PyramidKV":
        """Kvpress's PyramidKVPress, which is SnapKV wherever the last layer's share is under its window."""
        return cls(
            budget=from_compression_ratio(compression_ratio),
            window=window_size,
            kernel=kernel_size,
            pooling="avg",
            group_order="after_pooling",
            sinks=0,
            allocation=Pyramid(beta=beta, variant="kvpress"),
        )
