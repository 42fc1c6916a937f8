"""KV-cache compression for JAX: caches that really shrink, for any model that leaves its attention to a policy."""

from kvjax._version import __version__
from kvjax.allocation import Adaptive, Pyramid, Uniform
from kvjax.chat import Chat, RereadWarning
from kvjax.decoding import NewToken
from kvjax.generation import Result, generate
from kvjax.head_pattern import HeadPattern
from kvjax.inspection import AttentionMass, TokenRetention, attention_mass, kept_mask, retention_table
from kvjax.model import Model
from kvjax.plots import retention_map
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
from kvjax.prompts import LongContextWarning, NonFiniteWarning
from kvjax.saving import restore_cache, save_cache
from kvjax.state import EMPTY, Cache, Kept, LayerSpec, LayerState, ModelSpec, Rows
from kvjax.statistics import Stats, cache_bytes, kept_positions
from kvjax.steps import decode, extend, prefill

__all__ = [
    "EMPTY",
    "H2O",
    "TOVA",
    "AdaKV",
    "Adaptive",
    "Asked",
    "AttentionMass",
    "Cache",
    "Chat",
    "DuoAttention",
    "ExpectedAttention",
    "Full",
    "HeadPattern",
    "Kept",
    "Knorm",
    "LayerSpec",
    "LayerState",
    "LongContextWarning",
    "Model",
    "ModelSpec",
    "NewToken",
    "NonFiniteWarning",
    "Policy",
    "Pyramid",
    "PyramidKV",
    "RereadWarning",
    "Result",
    "Rows",
    "ScoredPolicy",
    "SnapKV",
    "Stats",
    "StreamingLLM",
    "TokenRetention",
    "Uniform",
    "__version__",
    "attention_mass",
    "cache_bytes",
    "decode",
    "extend",
    "generate",
    "kept_mask",
    "kept_positions",
    "prefill",
    "restore_cache",
    "retention_map",
    "retention_table",
    "save_cache",
]
