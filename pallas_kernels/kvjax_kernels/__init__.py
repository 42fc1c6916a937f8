"""Attention kernels for compressed KV caches: arrays in, arrays out; no policy and no model is known here."""

from kvjax_kernels.column_sums.api import column_sums
from kvjax_kernels.prefill_attention.api import extend_attention, prefill_attention
from kvjax_kernels.ragged_decode_attention.api import DecodeAttention, ragged_decode_attention

__all__ = ["DecodeAttention", "column_sums", "extend_attention", "prefill_attention", "ragged_decode_attention"]
