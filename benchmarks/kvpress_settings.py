"""Policies with kvpress's settings, by the names of its methods here, for a budget instead of a ratio."""

import dataclasses

import kvjax

# The ratio is replaced by the budget.
_SNAPKV = kvjax.SnapKV.kvpress(compression_ratio=0.5)
_PRESETS: dict[str, kvjax.ScoredPolicy | kvjax.StreamingLLM] = {
    "StreamingLLM": kvjax.StreamingLLM.kvpress(compression_ratio=0.5),
    "H2O": kvjax.H2O.kvpress(compression_ratio=0.5),
    "SnapKV": _SNAPKV,
    "PyramidKV": kvjax.PyramidKV.kvpress(compression_ratio=0.5),
    "AdaKV": kvjax.AdaKV.kvpress(_SNAPKV),
    "TOVA": kvjax.TOVA.kvpress(compression_ratio=0.5),
    "Knorm": kvjax.Knorm.kvpress(compression_ratio=0.5),
    "ExpectedAttention": kvjax.ExpectedAttention.kvpress(compression_ratio=0.5),
}


def with_kvpress_settings(method: str, budget: int | float) -> kvjax.Policy:
    """The policy that keeps what kvpress's press of this method keeps."""
    return kvjax.Full() if method == "Full" else dataclasses.replace(_PRESETS[method], budget=budget)
