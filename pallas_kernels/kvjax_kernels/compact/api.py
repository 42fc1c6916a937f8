"""`compact`: checks arguments and chooses an implementation."""

from jaxtyping import Array, Float, Int

from kvjax_kernels.dispatch import run


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
    return run("compact", implementation, rows, source)
