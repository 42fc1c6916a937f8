"""What is computed by loops of unknown length, which have derivatives forwards but not backwards."""

from typing import NoReturn

import jax
from jax.custom_derivatives import linear_call


@jax.custom_jvp
def forward_only(scores: jax.Array) -> jax.Array:
    """`scores`, whose gradient is a NotImplementedError that says what to do, instead of one about a loop."""
    return scores


@forward_only.defjvp
def _tangent(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], linear_call(lambda _, tangent: tangent, _refuse, (), tangents[0])


def _refuse(residuals: object, cotangent: object) -> NoReturn:
    del residuals, cotangent
    raise NotImplementedError(
        "`kvjax.prefill` has no gradient in the model's arrays: its attention is a loop whose length depends on data. "
        "Train with an attention of your own, or with `kvjax_kernels.prefill_attention(..., "
        "implementation='reference')`."
    )
