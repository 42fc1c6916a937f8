"""Which slot a decoded token takes."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.state import EMPTY, Rows


def ring_slot(positions: Int[Array, "*shape"], window: Int[Array, "*shape"], *, sinks: int) -> Int[Array, "*shape"]:
    """The slot of a token in a ring behind `sinks` fixed slots; `EMPTY` positions give a slot too."""
    return jnp.where(positions < sinks, positions, sinks + jnp.mod(positions - sinks, window))


def ring_rows(
    rows: Rows,
    seen: Int[Array, "B K"],
    kept: Int[Array, "B K"],
    window: Int[Array, "B K"],
    *,
    sinks: int,
    slots: int,
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """The first `sinks` and the last of a head's tokens, each where decoding would have written it.

    Args:
        rows: all tokens, in ascending position.
        seen: tokens that the row has seen.
        kept: tokens to keep of each head, sinks included.
        window: slots of the ring.
        sinks: first tokens that stay.
        slots: of the segment, C.

    Returns:
        Indices along the rows' tokens, and which of them hold one.
    """
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
    recent = (kept - sinks)[..., None]
    # Slot sinks + i holds the token whose distance from the oldest one of the window is i, turned by the ring.
    turned = jnp.mod(slot - sinks - (seen[..., None] - recent - sinks), window[..., None])
    index = jnp.where(slot < sinks, slot, rows.lengths[..., None] - recent + turned)
    chosen = slot < kept[..., None]
    return jnp.where(chosen, index, 0), chosen


def lowest_slot(
    ranks: Float[Array, "B K S"],
    positions: Int[Array, "B K S"],
    newest: Int[Array, "B"],
    *,
    sinks: int,
    recent: Int[Array, "B K"],
) -> Int[Array, "B K"]:
    """The slot with the lowest rank outside the sinks and the recent tokens; of equal ranks the lower slot.

    NaN is the lowest rank, as in `select_highest`.

    Args:
        ranks: higher = keep.
        positions: of each slot's token, `EMPTY` where there is none.
        newest: position of the token that is to be written; it counts as a recent one.
        sinks: first positions that stay.
        recent: last tokens that stay.
    """
    oldest_recent = newest[:, None, None] - recent[..., None] + 1
    free_to_go = (positions != EMPTY) & (positions >= sinks) & (positions < oldest_recent)
    highest = jnp.finfo(ranks.dtype).max
    ranks = jnp.nan_to_num(ranks, nan=-jnp.inf, posinf=highest)
    return jnp.argmin(jnp.where(free_to_go, ranks, jnp.inf), axis=-1).astype(jnp.int32)
