"""Attention kernels for compressed KV caches: arrays in, arrays out; no policy and no model is known here."""

from kvjax_kernels.column_sums.api import column_sums
from kvjax_kernels.compact.api import compact
from kvjax_kernels.compact_in_place.api import compact_in_place
from kvjax_kernels.extend_attention.api import extend_attention
from kvjax_kernels.pooled_attention.api import pooled_attention
from kvjax_kernels.pooled_selection.api import pooled_selection
from kvjax_kernels.prefill_attention.api import prefill_attention
from kvjax_kernels.ragged_decode_attention.api import ragged_decode_attention
from kvjax_kernels.ragged_decode_attention.types import DecodeAttention
from kvjax_kernels.select_highest.api import select_highest
from kvjax_kernels.select_highest.xla import mark_highest
from kvjax_kernels.split_rows import SplitRows, join_rows, split_rows, write_split

__all__ = [
    "DecodeAttention",
    "SplitRows",
    "column_sums",
    "compact",
    "compact_in_place",
    "extend_attention",
    "join_rows",
    "mark_highest",
    "pooled_attention",
    "pooled_selection",
    "prefill_attention",
    "ragged_decode_attention",
    "select_highest",
    "split_rows",
    "write_split",
]
