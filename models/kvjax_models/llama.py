"""Llama in Flax NNX: embeddings, layers and logits; attention is whatever the caller hands in."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from kvjax.state import Attend, ModelSpec
from kvjax_models.config import LlamaConfig

#: Tokens of a row that go through an MLP at once: enough that its products are bound by arithmetic on any chip.
_STRETCH = 1024


def _weights(shape: tuple[int, ...], dtype: DTypeLike, *, scale: float, rngs: nnx.Rngs | None) -> nnx.Param:
    """Random weights; without `rngs` only their shape."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * scale)


def _vector(size: int, value: float, dtype: DTypeLike, *, rngs: nnx.Rngs | None) -> nnx.Param:
    """One number `size` times; without `rngs` only the shape."""
    return nnx.Param(jax.ShapeDtypeStruct((size,), dtype) if rngs is None else jnp.full((size,), value, dtype))


class Linear(nnx.Module):
    """`x @ kernel + bias`; the kernel is stored [in, out], several times faster for one row than [out, in]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs | None):
        self.kernel = _weights((inputs, outputs), dtype, scale=1 / math.sqrt(inputs), rngs=rngs)
        self.bias = _vector(outputs, 0, dtype, rngs=rngs) if bias else None

    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
        """Applies the layer to the last axis."""
        y = x @ self.kernel[...]
        if self.bias is None:
            return y
        return y + self.bias[...].reshape((1,) * (y.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, *, epsilon: float, dtype: DTypeLike, rngs: nnx.Rngs | None):
        self.scale = _vector(size, 1, dtype, rngs=rngs)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        """Normalises the last axis."""
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        normed = (x32 * jax.lax.rsqrt(mean_square + self.epsilon)).astype(x.dtype)
        return normed * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))


def _in_stretches(
    block: Callable[[Float[Array, "B _T H"]], Float[Array, "B _T H"]], x: Float[Array, "B T H"]
) -> Float[Array, "B T H"]:
    """`block(x)`, for a long prompt one stretch of tokens after the other, each in its input's place.

    What is held in between then does not grow with the prompt: an MLP's is several times as wide as `x`. Nor does it
    where a gradient is taken, for which a stretch is computed again.
    """
    tokens = x.shape[1]
    if tokens <= _STRETCH:
        return block(x)
    block, whole = jax.checkpoint(block), tokens // _STRETCH

    def one(index: jax.Array, x: jax.Array) -> jax.Array:
        start = index * _STRETCH
        part = jax.lax.dynamic_slice_in_dim(x, start, _STRETCH, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(x, block(part), start, axis=1)

    x = jax.lax.fori_loop(0, whole, one, x)
    rest = whole * _STRETCH
    return x if rest == tokens else x.at[:, rest:].set(block(x[:, rest:]))


class DecoderLayer(nnx.Module):
    """One pre-norm block: attention, then the SwiGLU MLP."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs | None):
        hidden, inner = config.hidden_size, config.intermediate_size
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        attention = {"bias": config.attention_bias, "dtype": dtype, "rngs": rngs}
        mlp = {"bias": config.mlp_bias, "dtype": dtype, "rngs": rngs}
        self.input_norm = RMSNorm(hidden, epsilon=config.rms_norm_eps, dtype=dtype, rngs=rngs)
        self.q_proj = Linear(hidden, query_size, **attention)
        self.k_proj = Linear(hidden, kv_size, **attention)
        self.v_proj = Linear(hidden, kv_size, **attention)
        self.o_proj = Linear(query_size, hidden, **attention)
        self.post_attention_norm = RMSNorm(hidden, epsilon=config.rms_norm_eps, dtype=dtype, rngs=rngs)
        self.gate_proj = Linear(hidden, inner, **mlp)
        self.up_proj = Linear(hidden, inner, **mlp)
        self.down_proj = Linear(inner, hidden, **mlp)
        self.head_dim = config.head_dim

    def __call__(self, layer: int, x: Float[Array, "B T H"], attend: Attend) -> Float[Array, "B T H"]:
        """Applies the block; `attend` is called with `layer`."""
        h = self.input_norm(x)
        # Without the barrier XLA's TPU compiler folds the split into heads into the product, and copies the weights
        # into another layout at every step to do so.
        projected = jax.lax.optimization_barrier((self.q_proj(h), self.k_proj(h), self.v_proj(h)))
        query, key, value = (x.reshape(*h.shape[:2], -1, self.head_dim) for x in projected)
        attended = attend(layer, query, key, value)
        return _in_stretches(self._mlp, x + self.o_proj(attended.reshape(*h.shape[:2], -1)))

    def _mlp(self, x: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        h = self.post_attention_norm(x)
        return x + self.down_proj(jax.nn.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nnx.Module):
    """A Llama-family decoder.

    Layers are a Python list, so that every layer's cache may have a shape of its own.

    Args:
        config: the static configuration.
        dtype: of every parameter.
        rngs: of random weights. None makes a model without weights, of `jax.ShapeDtypeStruct`s: what a checkpoint
            fills, and what programs can be compiled for.

    Attributes:
        config: the static configuration.
        embedding: [vocabulary, hidden]; also the output matrix where `tie_word_embeddings`.
        lm_head: [hidden, vocabulary], or None where tied.
    """

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs | None):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = _weights(shape, dtype, scale=0.02, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype, rngs=rngs)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)
        )

    @property
    def spec(self) -> ModelSpec:
        """What policies and generation need to know of the model."""
        return ModelSpec(
            num_layers=self.config.num_hidden_layers,
            num_query_heads=self.config.num_attention_heads,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            vocab_size=self.config.vocab_size,
            max_positions=self.config.max_position_embeddings,
            dtype=str(self.embedding.dtype),
            rope=self.config.rope,
            stop_tokens=self.config.eos_token_ids,
        )

    def __call__(self, tokens: Int[Array, "B T"], attend: Attend) -> Float[Array, "B T H"]:
        """Hidden states after the final norm.

        Args:
            tokens: token ids; what pads hold does not matter, `attend` knows which they are.
            attend: `attend(layer, query, key, value) -> output`, all [B, T, heads, D], before RoPE.
        """
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, attend)
        return self.norm(x)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """What the first layer takes."""
        return self.embedding[...][tokens]

    def logits(self, hidden: Float[Array, "R H"]) -> Float[Array, "R V"]:
        """Scores of the next token, float32, for each row of hidden states."""
        if self.lm_head is not None:
            return self.lm_head(hidden).astype(jnp.float32)
        # `hidden @ embedding.T` takes five times as long for one row on CPU.
        return (self.embedding[...] @ hidden.T).T.astype(jnp.float32)
