"""`select_highest`: checks arguments and chooses an implementation; C chosen tokens."""

from jaxtyping import Array, Bool, Float, Int

from kvjax_kernels.dispatch import run


def select_highest(
    scores: Float[Array, "B K S"], counts: Int[Array, "B K"], *, most: int, implementation: str | None = None
) -> tuple[Int[Array, "B K C"], Bool[Array, "B K C"]]:
    """The `counts` highest of each head, in ascending order; of equal scores the lower index wins.

    Args:
        scores: any float32; `ABSENT` where there is no token. Subnormal numbers are equal to zero, NaN comes after
            `ABSENT`.
        counts: how many each head keeps, at most `most` and at most the tokens that it has.
        most: static bound, C = min(most, S).
        implementation: one of `dispatch.IMPLEMENTATIONS`; None picks by platform.

    Returns:
        Indices along S, and which of them are chosen; those not chosen come last.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown implementation.
        NotImplementedError: the named implementation cannot do this.
    """
    if scores.shape[:2] != counts.shape:
        raise ValueError(f"`scores` [B, K, S] and `counts` [B, K] must agree, got {scores.shape} and {counts.shape}.")
    if most < 1:
        raise ValueError(f"`most` must be at least 1, got {most}.")
    return run("select_highest", implementation, scores, counts, most=min(most, scores.shape[2]))
