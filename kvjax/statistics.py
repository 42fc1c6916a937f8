"""What a cache holds, and what it costs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.state import Cache, segment_starts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What an answer took.

    Attributes:
        prompt_tokens: of each row, in this call.
        new_tokens: generated, of each row.
        kept_tokens: held at the end, the mean over rows, layers and KV heads.
        seen_tokens: seen by the cache, the mean over rows.
        cache_bytes: of all the cache's arrays, as they are in memory: empty slots and positions included.
        full_cache_bytes: of the keys and values that a full cache would need for the longest row's tokens and the
            room for new ones, in every row.
        prefill_seconds: until the first scores, compilation included.
        decode_seconds: for the new tokens, compilation included.
        compile_seconds: of both together, what the compiler took, or reading what it had compiled before.
        implementations: which implementation of each kernel operation ran.
    """

    prompt_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    kept_tokens: float
    seen_tokens: float
    cache_bytes: int
    full_cache_bytes: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    implementations: dict[str, str]

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, over all rows."""
        return sum(self.new_tokens) / max(self.decode_seconds, 1e-9)


def stats_of(cache: Cache, *, prompt_tokens: np.ndarray, new_tokens: np.ndarray, room: int, **measured: Any) -> Stats:
    """What an answer took.

    Args:
        cache: at its end.
        prompt_tokens: [B], of each row.
        new_tokens: [B], of each row.
        room: the longest answer that there was room for.
        measured: the seconds and implementations of `Stats`.
    """
    seen = np.asarray(cache.next_position)
    return Stats(
        prompt_tokens=tuple(prompt_tokens.tolist()),
        new_tokens=tuple(new_tokens.tolist()),
        kept_tokens=kept_tokens(cache),
        seen_tokens=float(seen.mean()),
        cache_bytes=cache_bytes(cache),
        full_cache_bytes=full_cache_bytes(cache, int((seen - new_tokens).max()) + room),
        **measured,
    )


def cache_bytes(cache: Cache) -> int:
    """Bytes of all arrays of a cache."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def full_cache_bytes(cache: Cache, length: int) -> int:
    """Bytes of the keys and values of `length` tokens in every row: 2 B L n K D P."""
    model = cache.model
    rows = cache.next_position.shape[0] * model.num_layers * length * model.num_kv_heads
    return 2 * rows * model.head_dim * jnp.dtype(cache.specs[0].dtype).itemsize


def kept_positions(cache: Cache) -> list[list[list[np.ndarray]]]:
    """The absolute positions that are held, ascending: [layer][row][KV head] -> int array."""
    layers = []
    for spec, state in zip(cache.specs, cache.layers, strict=True):
        positions, lengths = np.asarray(state.positions), np.asarray(state.lengths)
        starts = np.asarray(segment_starts(state, spec))
        layers.append(
            [
                [np.sort(row[start : start + length]) for start, length in zip(*bounds, strict=True)]
                for row, *bounds in zip(positions, starts, lengths, strict=True)
            ]
        )
    return layers


def kept_tokens(cache: Cache) -> float:
    """Tokens held by a KV head, the mean over rows, layers and heads."""
    return float(np.mean([np.asarray(state.lengths).mean() for state in cache.layers]))
