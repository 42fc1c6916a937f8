"""How far a model with mixed heads is from itself with full attention, and the gradient by every head's alpha.

B batch, T tokens, H hidden size, L layers, K KV heads.

The model is run a layer at a time, and only what goes into each layer is kept; on the way back, a layer is computed
once more before its derivative is. So memory is L residual streams and one layer's activations, and all layers share
one compiled program in each direction.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.duo.mixed_attention import Streaming, mixed_attention, sums_dtype
from kvjax.model import Model
from kvjax.rope import Rotation
from kvjax.state import Attend
from kvjax_kernels import prefill_attention

#: `layer(index, hidden [B, T, H], attend) -> hidden [B, T, H]`, a pytree.
Layer = Callable[[int, jax.Array, Attend], jax.Array]


@runtime_checkable
class LayeredModel(Model, Protocol):
    """A model whose parts can be run by themselves: what learning a pattern asks beyond `kvjax.Model`.

    `kvjax_models.Llama` is one. Layers that are alike but for their arrays are compiled once.
    """

    @property
    def layers(self) -> Sequence[Layer]:
        """The decoder layers, each a pytree."""
        ...

    @property
    def norm(self) -> Callable[[jax.Array], jax.Array]:
        """What the last layer's output goes through, a pytree."""
        ...

    def embed(self, tokens: jax.Array) -> jax.Array:
        """What the first layer takes, [B, T, H]."""
        ...


def distillation(
    model: LayeredModel,
    alphas: Float[Array, "L K"],
    tokens: Int[Array, "B T"],
    labels: Bool[Array, "B T"],
    streaming: Streaming,
) -> tuple[Float[Array, ""], Float[Array, "L K"]]:
    """The distillation loss and its gradient by `alphas`.

    The loss is the squared difference of the last hidden states (after the final norm) of the mixed and the full
    model, its mean over the hidden axis, then over a row's labelled tokens, then over rows.

    Args:
        model: stays as it is.
        alphas: of each KV head.
        tokens: prompts of one length.
        labels: tokens whose hidden states count, one or more in each row.
        streaming: what the streaming branch sees.
    """
    rope = model.spec.rope
    target = model.embed(tokens)
    inputs = [target]
    for layer in model.layers:
        target = _full_layer(layer, target, rope)
    for layer, alpha in zip(model.layers, alphas, strict=True):
        inputs.append(_mixed_layer(layer, inputs[-1], alpha, rope, streaming))
    loss, slope = _loss(model.norm, inputs.pop(), target, labels)
    gradient = []
    for layer, alpha in zip(reversed(model.layers), reversed(alphas), strict=True):
        slope, by_alpha = _mixed_layer_backward(layer, inputs.pop(), alpha, slope, rope, streaming)
        gradient.append(by_alpha)
    return loss, jnp.stack(gradient[::-1])


@functools.partial(jax.jit, static_argnames="rope")
def _full_layer(layer: Any, hidden: Float[Array, "B T H"], rope: Rotation) -> Float[Array, "B T H"]:
    def attend(_: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return prefill_attention(*_rotated(query, key, rope), value)[0]

    return layer(0, hidden, attend)


@functools.partial(jax.jit, static_argnames=("rope", "streaming"))
def _mixed_layer(
    layer: Any, hidden: Float[Array, "B T H"], alpha: Float[Array, "K"], rope: Rotation, streaming: Streaming
) -> Float[Array, "B T H"]:
    def attend(_: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return mixed_attention(*_rotated(query, key, rope), value, alpha, streaming)

    return layer(0, hidden, attend)


@functools.partial(jax.jit, static_argnames=("rope", "streaming"))
def _mixed_layer_backward(
    layer: Any,
    hidden: Float[Array, "B T H"],
    alpha: Float[Array, "K"],
    slope: Float[Array, "B T H"],
    rope: Rotation,
    streaming: Streaming,
) -> tuple[Float[Array, "B T H"], Float[Array, "K"]]:
    """The derivatives by a layer's input and alphas, given that by its output."""
    _, pull_back = jax.vjp(lambda hidden, alpha: _mixed_layer(layer, hidden, alpha, rope, streaming), hidden, alpha)
    return pull_back(slope)


@jax.jit
def _loss(
    norm: Any, hidden: Float[Array, "B T H"], target: Float[Array, "B T H"], labels: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, "B T H"]]:
    kind = sums_dtype(hidden)

    def loss(hidden: jax.Array) -> jax.Array:
        apart = norm(hidden).astype(kind) - norm(target).astype(kind)
        squared = jnp.where(labels, (apart * apart).mean(-1), 0.0)
        return (squared.sum(-1) / labels.sum(-1).astype(kind)).mean()

    return jax.value_and_grad(loss)(hidden)


def _rotated(query: jax.Array, key: jax.Array, rope: Rotation) -> tuple[jax.Array, jax.Array]:
    positions = jnp.broadcast_to(jnp.arange(query.shape[1])[None], query.shape[:2])
    return rope.rotate(query, positions), rope.rotate(key, positions)
