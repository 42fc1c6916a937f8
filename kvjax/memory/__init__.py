"""What a policy costs before anything runs: bytes of its cache and of a step, what fits, and what to choose."""

from kvjax.memory.accelerators import ACCELERATORS, Accelerator
from kvjax.memory.cache_bytes import full_cache_bytes, held_tokens, state_bytes, step_bytes
from kvjax.memory.deployment import Deployment, ModelSize, device_counts
from kvjax.memory.planning import PolicyPlan, fewest_devices, plan
from kvjax.memory.recommendations import Recommendation, recommend

__all__ = [
    "ACCELERATORS",
    "Accelerator",
    "Deployment",
    "ModelSize",
    "PolicyPlan",
    "Recommendation",
    "device_counts",
    "fewest_devices",
    "full_cache_bytes",
    "held_tokens",
    "plan",
    "recommend",
    "state_bytes",
    "step_bytes",
]
