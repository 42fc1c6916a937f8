"""Rotary position embeddings, exact at positions of millions."""

import dataclasses
import functools
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Positions are split into digits of these widths (31 bits in all), lowest first. Below 4,096 the angle is the
# plain float32 product; above, float32 `position * frequency` would be off by 0.06 rad at a million.
_DIGIT_BITS = (12, 10, 9)


@runtime_checkable
class Rotation(Protocol):
    """What a policy needs of a model's position embedding: hashable, and a pure function of positions."""

    def rotate(self, x: Float[Array, "B T H D"], positions: Int[Array, "B T"]) -> Float[Array, "B T H D"]:
        """Rotates queries or keys to their positions."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """The scaled frequencies."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp between.

    Attributes:
        factor: the divisor for wavelengths over `original_max_positions / low_freq_factor`.
        low_freq_factor: see above.
        high_freq_factor: wavelengths under `original_max_positions / high_freq_factor` stay.
        original_max_positions: tokens of context before the scaling.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """The scaled frequencies."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(ramp, 0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding in Hugging Face's layout: dimension i is paired with i + D / 2.

    Su et al., "RoFormer" (arXiv 2104.09864).

    Attributes:
        head_dim: D, even.
        theta: base of the frequencies.
        scaling: how the frequencies are stretched for longer contexts, or None.
    """

    head_dim: int
    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | None = None

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even and positive for RoPE, got {self.head_dim}.")

    def frequencies(self) -> np.ndarray:
        """Angle per position, in radians: [D / 2] float64, each a float32 value as the weights were trained."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        frequencies = self.theta**-exponents
        if self.scaling is not None:
            frequencies = self.scaling(frequencies)
        return frequencies.astype(np.float32).astype(np.float64)

    def cos_sin(
        self, positions: Int[Array, "*shape"]
    ) -> tuple[Float[Array, "*shape half"], Float[Array, "*shape half"]]:
        """Cosines and sines of every angle, float32; exact to 1e-3 rad up to 2^31 positions."""
        cos, sin = None, None
        shift = 0
        for bits in _DIGIT_BITS:
            digit = (positions >> shift) & ((1 << bits) - 1)
            per_digit = np.mod(self.frequencies() * 2.0**shift, 2 * math.pi) if shift else self.frequencies()
            angle = digit.astype(jnp.float32)[..., None] * jnp.asarray(per_digit, jnp.float32).reshape(
                (1,) * positions.ndim + (-1,)
            )
            c, s = jnp.cos(angle), jnp.sin(angle)
            cos, sin = (c, s) if cos is None or sin is None else (cos * c - sin * s, sin * c + cos * s)
            shift += bits
        assert cos is not None
        assert sin is not None
        return cos, sin

    def rotate(self, x: Float[Array, "B T H D"], positions: Int[Array, "B T"]) -> Float[Array, "B T H D"]:
        """Rotates `x` to `positions`; negative positions (empty slots) give finite rubbish."""
        return _rotate(x, positions, rope=self)


# Jitted: what all layers of a model call is traced once.
@functools.partial(jax.jit, static_argnames="rope")
def _rotate(x: Float[Array, "B T H D"], positions: Int[Array, "B T"], *, rope: Rope) -> Float[Array, "B T H D"]:
    # Without the barrier XLA's CPU compiler computes every angle anew for each head.
    cos, sin = jax.lax.optimization_barrier(rope.cos_sin(positions))
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def rotate_one(rope: Rotation, x: Float[Array, "B H D"], positions: Int[Array, "B"]) -> Float[Array, "B H D"]:
    """Rotates one token a row."""
    return rope.rotate(x[:, None], positions[:, None])[:, 0]


def no_rope() -> Rotation:
    """A rotation that does nothing, for models whose positions are learned or absent."""
    return _NoRope()


@dataclasses.dataclass(frozen=True)
class _NoRope:
    def rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        del positions
        return x
