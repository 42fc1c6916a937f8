"""KV-cache compression for JAX: caches that really shrink, for any model that leaves its attention to a policy."""

from kvjax._version import __version__
from kvjax.generation import NewToken, Result, generate
from kvjax.model import Model
from kvjax.policies import Full, Policy, SnapKV, StreamingLLM
from kvjax.prompts import LongContextWarning
from kvjax.state import EMPTY, Cache, LayerSpec, LayerState, ModelSpec
from kvjax.statistics import Stats, cache_bytes, kept_positions
from kvjax.steps import decode, extend, prefill

__all__ = [
    "EMPTY",
    "Cache",
    "Full",
    "LayerSpec",
    "LayerState",
    "LongContextWarning",
    "Model",
    "ModelSpec",
    "NewToken",
    "Policy",
    "Result",
    "SnapKV",
    "Stats",
    "StreamingLLM",
    "__version__",
    "cache_bytes",
    "decode",
    "extend",
    "generate",
    "kept_positions",
    "prefill",
]
