"""The policies: which tokens stay in the cache."""

from kvjax.policies.ada_kv import AdaKV
from kvjax.policies.base import Asked, Policy
from kvjax.policies.duo_attention import DuoAttention
from kvjax.policies.expected_attention import ExpectedAttention
from kvjax.policies.full import Full
from kvjax.policies.h2o import H2O
from kvjax.policies.knorm import Knorm
from kvjax.policies.pyramidkv import PyramidKV
from kvjax.policies.scored import ScoredPolicy
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.streaming_llm import StreamingLLM
from kvjax.policies.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "AdaKV",
    "Asked",
    "DuoAttention",
    "ExpectedAttention",
    "Full",
    "Knorm",
    "Policy",
    "PyramidKV",
    "ScoredPolicy",
    "SnapKV",
    "StreamingLLM",
]
