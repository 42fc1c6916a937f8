"""`compact` and `compact_in_place`: check arguments and choose an implementation."""

from jaxtyping import Array, Float, Int

from kvjax_kernels.dispatch import choose


def compact(
    rows: Float[Array, "B M W"], source: Int[Array, "B C"], *, implementation: str | None = None
) -> Float[Array, "B C W"]:
    """The rows at `source`, zeros where it is negative; bit by bit.

    With the sources of each head's kept tokens one after another, heads' segments may have any lengths and starts.

    Args:
        rows: the rows of all heads, flat; those that no source names may hold anything.
        source: for each row of the result its place in `rows`, less than M; negative for none.
        implementation: one of `dispatch.IMPLEMENTATIONS`; None picks by platform.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    if rows.shape[0] != source.shape[0]:
        raise ValueError(f"`rows` [B, M, W] and `source` [B, C] must agree, got {rows.shape} and {source.shape}.")

    def no_tpu() -> str | None:
        from kvjax_kernels.compact import tpu

        return tpu.obstacle(rows, source)

    def no_gpu() -> str | None:
        from kvjax_kernels.compact import gpu

        return gpu.obstacle(rows, source, interpret=implementation == "gpu-interpret")

    choice = choose("compact", implementation, {"tpu": no_tpu, "gpu": no_gpu})
    # Imported here, so that a backend's module is loaded only where it is used.
    if choice.backend == "xla":
        from kvjax_kernels.compact import xla

        return xla.compact(rows, source)
    if choice.backend == "reference":
        from kvjax_kernels.compact import reference

        return reference.compact(rows, source)
    if choice.backend == "tpu":
        from kvjax_kernels.compact import tpu

        return tpu.compact(rows, source, interpret=choice.interpret)
    from kvjax_kernels.compact import gpu

    return gpu.compact(rows, source, interpret=choice.interpret)


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

    def no_tpu() -> str | None:
        from kvjax_kernels.compact import tpu

        return tpu.obstacle_in_place(pages, source)

    def no_gpu() -> str | None:
        from kvjax_kernels.compact import gpu

        return gpu.obstacle(pages, source, interpret=implementation == "gpu-interpret")

    choice = choose("compact_in_place", implementation, {"tpu": no_tpu, "gpu": no_gpu})
    # Imported here, so that a backend's module is loaded only where it is used.
    if choice.backend == "xla":
        from kvjax_kernels.compact import xla

        return xla.compact_in_place(pages, table, source)
    if choice.backend == "reference":
        from kvjax_kernels.compact import reference

        return reference.compact_in_place(pages, table, source)
    if choice.backend == "tpu":
        from kvjax_kernels.compact import tpu

        return tpu.compact_in_place(pages, table, source, interpret=choice.interpret)
    from kvjax_kernels.compact import gpu

    return gpu.compact_in_place(pages, table, source, interpret=choice.interpret)
