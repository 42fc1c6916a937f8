"""Cached rows taken apart into keys and values: the layout that plain JAX attends over fastest on a CPU."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


class SplitRows(NamedTuple):
    """The kv rows of one layer, keys and values apart; heads whose segments have C slots share an array.

    XLA's CPU compiler repacks rows that hold key and value side by side before it multiplies them, at two to three
    times the price of reading them. In these forms both products of attention run along the last axis as it lies.

    Attributes:
        keys: for each group of `head_groups` an array [B, H, D, C], slots last.
        values: for each group an array [B, H, C, D].
    """

    keys: tuple[Float[Array, "B _H D _C"], ...]
    values: tuple[Float[Array, "B _H _C D"], ...]


def head_groups(segments: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The KV heads whose segments are equally long, together."""
    return [tuple(h for h, slots in enumerate(segments) if slots == size) for size in dict.fromkeys(segments)]


def head_starts(segments: tuple[int, ...]) -> tuple[int, ...]:
    """The first slot of each KV head's segment."""
    return tuple(sum(segments[:head]) for head in range(len(segments)))


def split_rows(kv: Float[Array, "B S twoD"], segments: tuple[int, ...]) -> SplitRows:
    """The rows taken apart; `segments` are the slots of each KV head, one after another along S."""
    batch, _, width = kv.shape
    keys, values = [], []
    for heads, of_group in _grouped(kv, segments):
        rows = of_group.reshape(batch, len(heads), segments[heads[0]], width)
        keys.append(rows[..., : width // 2].swapaxes(2, 3))
        values.append(rows[..., width // 2 :])
    return SplitRows(tuple(keys), tuple(values))


def join_rows(rows: SplitRows, segments: tuple[int, ...]) -> Float[Array, "B S twoD"]:
    """The rows put together again."""
    joined = [
        jnp.concatenate([key.swapaxes(2, 3), value], axis=3) for key, value in zip(rows.keys, rows.values, strict=True)
    ]
    if len(joined) == 1:
        return joined[0].reshape(joined[0].shape[0], -1, joined[0].shape[3])
    return jnp.concatenate(in_head_order(joined, head_groups(segments)), axis=1)


def write_split(
    rows: SplitRows,
    segments: tuple[int, ...],
    slots: Int[Array, "B K"],
    key: Float[Array, "B K D"],
    value: Float[Array, "B K D"],
) -> SplitRows:
    """One token a row in the given slots of each head's segment; negative slots are not written."""
    keys, values = [], []
    for heads, old_key, old_value in zip(head_groups(segments), rows.keys, rows.values, strict=True):
        place = of_heads(slots, heads)
        # An index past the end is dropped.
        place = jnp.where(place < 0, old_key.shape[3], place)
        batch, head = (
            jnp.arange(place.shape[0], dtype=jnp.int32)[:, None],
            jnp.arange(len(heads), dtype=jnp.int32)[None],
        )
        new_key, new_value = (of_heads(x, heads).astype(old_key.dtype) for x in (key, value))
        keys.append(old_key.at[batch, head, :, place].set(new_key, mode="drop", unique_indices=True))
        values.append(old_value.at[batch, head, place].set(new_value, mode="drop", unique_indices=True))
    return SplitRows(tuple(keys), tuple(values))


def of_heads(array: Shaped[Array, "B K ..."], heads: tuple[int, ...]) -> Shaped[Array, "B _H ..."]:
    """The part of some KV heads, ascending; for neighbours a slice, which a compiler sees through."""
    first, behind = heads[0], heads[-1] + 1
    return array[:, first:behind] if len(heads) == behind - first else array[:, jnp.asarray(heads)]


def in_head_order(arrays: Sequence[Array], groups: list[tuple[int, ...]]) -> list[Array]:
    """For each KV head its part of the groups' arrays [B, H, ...]."""
    by_head = {
        head: of_group[:, place]
        for heads, of_group in zip(groups, arrays, strict=True)
        for place, head in enumerate(heads)
    }
    return [by_head[head] for head in sorted(by_head)]


def _grouped(
    kv: Float[Array, "B S twoD"], segments: tuple[int, ...]
) -> list[tuple[tuple[int, ...], Float[Array, "B _ twoD"]]]:
    """Each group's heads, and their segments one after another."""
    groups = head_groups(segments)
    if len(groups) == 1:
        return [(groups[0], kv)]
    starts = head_starts(segments)
    return [
        (heads, jnp.concatenate([kv[:, starts[head] : starts[head] + segments[head]] for head in heads], axis=1))
        for heads in groups
    ]
