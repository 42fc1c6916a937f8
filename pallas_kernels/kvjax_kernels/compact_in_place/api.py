"""`compact_in_place`: checks arguments and chooses an implementation."""

from jaxtyping import Array, Float, Int

from kvjax_kernels.dispatch import run


def compact_in_place(
    pages: Float[Array, "P R W"],
    table: Int[Array, "H N"],
    source: Int[Array, "H C"],
    *,
    implementation: str | None = None,
) -> Float[Array, "P R W"]:
    """Moves each head's kept rows to its first slots, within its own pages; where `pages` is donated, in place.

    Slot s of a head is slot s mod R of its page s // R. A head that has n rows left afterwards needs its first
    ceil(n / R) pages only. Contiguous segments of equal size are pages too: one for each head.

    Args:
        pages: P pages of R rows, shared by all heads of all sequences.
        table: the pages of each head in order; negative where it has fewer than N. No page belongs to two heads.
        source: for each of a head's first C slots, the slot whose row moves there, which must be the same or a later
            one, and later than that of the slots before; negative where the slot keeps what it holds.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None picks by platform.

    Returns:
        The pages; slots that nothing moves to hold what they held.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    if table.shape[0] != source.shape[0] or source.shape[1] > table.shape[1] * pages.shape[1]:
        raise ValueError(
            f"`pages` [P, R, W], `table` [H, N] and `source` [H, C] must agree, and C not exceed N R, "
            f"got {pages.shape}, {table.shape} and {source.shape}."
        )
    return run("compact_in_place", implementation, pages, table, source)
