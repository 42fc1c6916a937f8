"""What kvjax asks of a model."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import jax
from jax.core import Tracer

from kvjax.state import Attend, ModelSpec


@runtime_checkable
class Model(Protocol):
    """A decoder that leaves attention to the caller; a pytree, so that it can go through `jax.jit`.

    `kvjax_models.Llama` is one. A research model needs these three: a `spec`, the hidden states of tokens, and
    their logits.
    """

    @property
    def spec(self) -> ModelSpec:
        """Sizes, dtype and position embedding."""
        ...

    def __call__(self, tokens: jax.Array, attend: Attend) -> jax.Array:
        """Final hidden states [B, T, H] of token ids [B, T]; every layer calls `attend` once with its index."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Scores [R, V] of the next token, float32, for hidden states [R, H]."""
        ...


def check_model(params: object) -> Model:
    """`params` as a model, or a ValueError that says what it lacks."""
    if isinstance(params, Model):
        return params
    hint = ""
    if hasattr(params, "params"):
        hint = " (did you mean its `.params`?)"
    raise ValueError(
        f"`params` must be a model such as `kvjax_models.load(...).params`, with `spec`, `__call__` and `logits`; "
        f"got {type(params).__name__}{hint}."
    )


def check_mesh(leaves: Iterable[object]) -> None:
    """Raises a ValueError if a model's arrays lie on a mesh whose sharding has to be spelled out in every operation."""
    for leaf in leaves:
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types:
            raise ValueError(
                f"`params` must not lie on a mesh with Explicit axes, got {mesh}: make it with "
                "`axis_types=(jax.sharding.AxisType.Auto,) * n`, and move them there with `jax.device_put`."
            )
