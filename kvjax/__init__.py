"""KV-cache compression for JAX: caches that really shrink, for any model that leaves its attention to a policy."""

from kvjax._version import __version__
from kvjax.allocation import Adaptive, Pyramid, Uniform
from kvjax.generation import NewToken, Result, generate
from kvjax.head_pattern import HeadPattern
from kvjax.model import Model
from kvjax.policies import (
    H2O,
    TOVA,
    AdaKV,
    Asked,
    DuoAttention,
    ExpectedAttention,
    Full,
    Knorm,
    Policy,
    PyramidKV,
    ScoredPolicy,
    SnapKV,
    StreamingLLM,
)
from kvjax.prompts import LongContextWarning
from kvjax.saving import restore_cache, save_cache
from kvjax.state import EMPTY, Cache, LayerSpec, LayerState, ModelSpec, Rows
from kvjax.statistics import Stats, cache_bytes, kept_positions
from kvjax.steps import decode, extend, prefill

__all__ = [
    "EMPTY",
    "H2O",
    "TOVA",
    "AdaKV",
    "Adaptive",
    "Asked",
    "Cache",
    "DuoAttention",
    "ExpectedAttention",
    "Full",
    "HeadPattern",
    "Knorm",
    "LayerSpec",
    "LayerState",
    "LongContextWarning",
    "Model",
    "ModelSpec",
    "NewToken",
    "Policy",
    "Pyramid",
    "PyramidKV",
    "Result",
    "Rows",
    "ScoredPolicy",
    "SnapKV",
    "Stats",
    "StreamingLLM",
    "Uniform",
    "__version__",
    "cache_bytes",
    "decode",
    "extend",
    "generate",
    "kept_positions",
    "prefill",
    "restore_cache",
    "save_cache",
]
