"""The policies: which tokens stay in the cache."""

from kvjax.policies.base import Policy
from kvjax.policies.full import Full
from kvjax.policies.snapkv import SnapKV
from kvjax.policies.streaming_llm import StreamingLLM

__all__ = ["Full", "Policy", "SnapKV", "StreamingLLM"]
