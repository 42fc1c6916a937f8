"""Ada-KV: the heads of a layer share its budget."""

import dataclasses

from kvjax.allocation import Adaptive, Allocation
from kvjax.policies.scored import ScoredPolicy
from kvjax.policies.snapkv import SnapKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaKV(SnapKV):
    """SnapKV whose heads choose together: those with spread-out attention keep more; `budget` is the heads' mean.

    Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation" (arXiv 2407.11550), on SnapKV
    as in the paper. Heads really have different lengths. For the other settings see `SnapKV`; any other score can
    have `allocation=Adaptive()` too.

    Attributes:
        allocation: `Adaptive(safeguard=0.2)`.
    """

    allocation: Allocation = Adaptive()  # noqa: RUF009 (frozen, so it may be shared)

    @staticmethod
    def over(policy: ScoredPolicy, *, safeguard: float = 0.2) -> ScoredPolicy:
        """Another policy's score with Ada-KV's allocation within each layer."""
        layers = policy.allocation
        if isinstance(layers, Adaptive):
            raise ValueError(f"`policy` has an adaptive allocation already: {layers}.")
        return dataclasses.replace(policy, allocation=Adaptive(safeguard=safeguard, layers=layers))  # pyright: ignore

    @classmethod
    def kvpress(cls, press: ScoredPolicy, *, alpha_safeguard: float = 0.2) -> ScoredPolicy:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Kvpress's AdaKVPress over one of its presses, which only masks what is kept here for real."""
        return cls.over(press, safeguard=alpha_safeguard)
