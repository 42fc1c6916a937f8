"""One layer's attention, driven token by token, and what it should give."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.rope import Rope

HEAD_DIM = 16
ROPE = Rope(head_dim=HEAD_DIM)


@dataclasses.dataclass
class Stream:
    """Queries, keys and values of one layer for rows of tokens, and the compiled policy methods.

    Attributes:
        model: sizes of a one-layer model.
        query: [B, T, N, D].
        key: [B, T, K, D].
        value: [B, T, K, D].
    """

    model: kvjax.ModelSpec
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray

    def spec(self, policy: kvjax.Policy, prompt: int, new: int) -> kvjax.LayerSpec:
        return policy.layer_specs(self.model, prompt, new)[0]

    def positions(self, lengths: np.ndarray, width: int, start: np.ndarray | int = 0) -> jax.Array:
        offset = np.arange(width)[None]
        start = np.broadcast_to(np.asarray(start), np.asarray(lengths).shape)
        return jnp.asarray(np.where(offset < lengths[:, None], start[:, None] + offset, kvjax.EMPTY), jnp.int32)

    def take(self, positions: jax.Array, rows: slice = slice(None)) -> tuple[jax.Array, ...]:
        """Queries, keys and values at positions [B, T]; rubbish at pads."""
        index = np.maximum(np.asarray(positions), 0)[:, :, None, None]
        return tuple(
            jnp.asarray(np.take_along_axis(x[rows], index, axis=1)) for x in (self.query, self.key, self.value)
        )

    def prefill(self, policy, spec, positions, rows=slice(None)):
        return _prefill(policy, spec, *self.take(positions, rows), positions, self.model.rope)

    def extend(self, policy, spec, state, positions, *, held_spec=None, rows=slice(None)):
        arrays = self.take(positions, rows)
        return _extend(policy, spec, state, *arrays, positions, self.model.rope, held_spec or spec)

    def decode(self, policy, spec, state, positions, rows=slice(None)):
        arrays = (x[:, 0] for x in self.take(positions[:, None], rows))
        return _decode(policy, spec, state, *arrays, positions, self.model.rope)

    def expected(self, row: int, head: int, position: int, kept: np.ndarray, places: np.ndarray | None = None):
        """The output for one query head: softmax over `kept` positions, computed in float64 from scratch.

        `places` are the positions that the kept keys are rotated to, the query's own last; absolute by default.
        """
        group = self.model.num_query_heads // self.model.num_kv_heads
        places = np.append(kept, position) if places is None else places
        rotate = functools.partial(_rotate, theta=ROPE.theta)
        query = rotate(np.asarray(self.query[row, position, head], np.float64)[None], places[-1:])[0]
        keys = rotate(np.asarray(self.key[row, kept, head // group], np.float64), places[:-1])
        scores = keys @ query / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max())
        return weights / weights.sum() @ np.asarray(self.value[row, kept, head // group], np.float64)


def _rotate(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding as complex multiplication."""
    half = x.shape[-1] // 2
    turn = np.exp(1j * positions[:, None] * theta ** (-np.arange(half) / half))
    turned = (x[:, :half] + 1j * x[:, half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


# Compiling takes most of these tests' time, and speed is not what they are about.
_QUICKLY = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnums=(0, 1, 6), compiler_options=_QUICKLY)
def _prefill(policy, spec, query, key, value, positions, rope):
    return policy.prefill(spec, query, key, value, positions, rope)


@functools.partial(jax.jit, static_argnums=(0, 1, 7, 8), compiler_options=_QUICKLY)
def _extend(policy, spec, state, query, key, value, positions, rope, held_spec):
    return policy.extend(spec, state, query, key, value, positions, rope, held_spec=held_spec)


@functools.partial(jax.jit, static_argnums=(0, 1, 7), compiler_options=_QUICKLY)
def _decode(policy, spec, state, query, key, value, positions, rope):
    return policy.decode(spec, state, query, key, value, positions, rope)


@pytest.fixture(scope="session")
def make_stream():
    """Builds a stream: `make_stream(group=3, dtype="float32", rows=2, length=100)`."""

    @functools.cache
    def make(*, group: int = 3, dtype: str = "float32", rows: int = 2, length: int = 100, kv_heads: int = 2) -> Stream:
        rng = np.random.default_rng(group)
        model = kvjax.ModelSpec(
            num_layers=1,
            num_query_heads=group * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            vocab_size=8,
            max_positions=4096,
            dtype=dtype,
            rope=ROPE,
        )
        shapes = [(rows, length, heads, HEAD_DIM) for heads in (group * kv_heads, kv_heads, kv_heads)]
        # Scores with a spread of several units, so that attention is peaky and choices do not tie.
        query, key, value = (
            (scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype))
            for shape, scale in zip(shapes, (2.0, 1.5, 1.0), strict=True)
        )
        return Stream(model, query, key, value)

    return make


@pytest.fixture(scope="session")
def traced():
    """Traces a layer's prefill, its next turn of 16 tokens and a decoded token: their jaxprs, and their results."""

    def trace(policy: kvjax.Policy, model: kvjax.ModelSpec, length: int):
        def arrays(*shape: int):
            heads = (model.num_query_heads, model.num_kv_heads, model.num_kv_heads)
            return [jax.ShapeDtypeStruct((*shape, h, model.head_dim), jnp.dtype(model.dtype)) for h in heads]

        def positions(*shape: int):
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        def prefill(*given):
            return policy.prefill(spec, *given, rope=model.rope)

        def extend(state, *given):
            return policy.extend(later, state, *given, rope=model.rope, held_spec=spec)

        def decode(state, *given):
            return policy.decode(later, state, *given, rope=model.rope)

        spec, later = (policy.layer_specs(model, seen, 8)[0] for seen in (length, length + 16))
        make = functools.partial(jax.make_jaxpr, return_shape=True)
        first = make(prefill)(*arrays(1, length), positions(1, length))
        second = make(extend)(first[1][1], *arrays(1, 16), positions(1, 16))
        return first, second, make(decode)(second[1][1], *arrays(1), positions(1))

    return trace
