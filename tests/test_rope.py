"""Rotary embeddings against Hugging Face's formula in float64, and exact angles far out."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.rope import LinearScaling, Llama3Scaling, Rope, no_rope, rotate_one

rng = np.random.default_rng(0)


def hugging_face(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """`apply_rotary_pos_emb` of transformers, x [B, T, H, D], in float64."""
    head_dim = x.shape[-1]
    inverse_frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    angles = positions[..., None] * inverse_frequencies
    both = np.concatenate([angles, angles], axis=-1)[:, :, None]
    half_turned = np.concatenate([-x[..., head_dim // 2 :], x[..., : head_dim // 2]], axis=-1)
    return x * np.cos(both) + half_turned * np.sin(both)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 1e4), (16, 1e4), (64, 1e5), (128, 5e5)])
def test_rotates_as_hugging_face_does(head_dim, theta):
    x = rng.normal(size=(2, 50, 3, head_dim)).astype(np.float32)
    positions = rng.integers(0, 4096, (2, 50)).astype(np.int32)
    rotated = Rope(head_dim=head_dim, theta=theta).rotate(jnp.asarray(x), jnp.asarray(positions))
    largest = np.abs(rotated - hugging_face(x.astype(np.float64), positions, theta)).max()
    assert largest < 2e-3, f"the largest difference is {largest:.1e}"
    near = np.abs(
        Rope(head_dim=head_dim, theta=theta).rotate(jnp.asarray(x), jnp.asarray(positions % 64))
        - hugging_face(x.astype(np.float64), positions % 64, theta)
    ).max()
    assert near < 5e-5, f"the largest difference is {near:.1e}"


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_angles_are_exact_at_positions_of_millions(head_dim):
    rope = Rope(head_dim=head_dim)
    positions = np.asarray([4095, 4096, 4097, 10**6, 2**22 - 1, 2**22, 123_456_789, 2**30, 2**31 - 1], np.int64)
    cos, sin = rope.cos_sin(jnp.asarray(positions, jnp.int32))
    # The frequencies are float32 numbers, as in the models; the product is exact in float64.
    angles = positions[:, None] * rope.frequencies()
    distance = np.abs((np.arctan2(np.asarray(sin, np.float64), cos) - angles + math.pi) % (2 * math.pi) - math.pi)
    assert distance.max() < 1e-3, f"off by {distance.max():.1e} rad at {positions[distance.max(-1).argmax()]}"
    np.testing.assert_allclose(np.asarray(cos) ** 2 + np.asarray(sin) ** 2, 1.0, atol=1e-5)


def test_neighbours_stay_neighbours_far_out():
    x = jnp.asarray(rng.normal(size=(1, 6, 2, 32)), jnp.float32)
    steps = jnp.arange(6, dtype=jnp.int32)[None]
    rope = Rope(head_dim=32)
    products = {}
    for start in (0, 10**6, 2**30):
        rotated = np.asarray(rope.rotate(x, steps + start))
        products[start] = np.einsum("bthd,bshd->bhts", rotated, rotated)
        largest = np.abs(products[start] - products[0]).max()
        assert largest < 0.02, f"scores change by {largest:.1e} at {start}"


def test_a_rotation_keeps_lengths_and_adds_up():
    x = jnp.asarray(rng.normal(size=(1, 4, 2, 32)), jnp.float32)
    rope = Rope(head_dim=32)
    once = rope.rotate(x, jnp.full((1, 4), 30, jnp.int32))
    np.testing.assert_allclose(jnp.linalg.norm(once, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    twice = rope.rotate(once, jnp.full((1, 4), 12, jnp.int32))
    np.testing.assert_allclose(twice, rope.rotate(x, jnp.full((1, 4), 42, jnp.int32)), atol=2e-5)
    np.testing.assert_array_equal(rope.rotate(x, jnp.zeros((1, 4), jnp.int32)), x)


def test_dimension_i_is_paired_with_i_plus_half():
    x = jnp.zeros((1, 1, 1, 8)).at[..., 1].set(1.0)
    rotated = Rope(head_dim=8).rotate(x, jnp.full((1, 1), 3, jnp.int32))
    # Pair 1 of 4 turns by 3 * 10000^(-1/4) = 0.3 rad.
    wanted = np.zeros(8)
    wanted[1], wanted[5] = math.cos(0.3), math.sin(0.3)
    np.testing.assert_allclose(rotated[0, 0, 0], wanted, atol=1e-6)


def test_empty_positions_give_finite_rubbish():
    rotated = Rope(head_dim=16).rotate(jnp.ones((1, 2, 1, 16)), jnp.full((1, 2), -1, jnp.int32))
    assert np.isfinite(rotated).all()


def test_rotation_is_in_float32_and_keeps_the_dtype():
    x = jnp.asarray(rng.normal(size=(1, 3, 1, 16)), jnp.bfloat16)
    positions = jnp.asarray([[5, 3000, 10**6]], jnp.int32)
    rotated = Rope(head_dim=16).rotate(x, positions)
    assert rotated.dtype == jnp.bfloat16
    exact = Rope(head_dim=16).rotate(x.astype(jnp.float32), positions)
    np.testing.assert_array_equal(rotated, exact.astype(jnp.bfloat16))


def test_rotate_one_is_rotate_of_one_token():
    x = jnp.asarray(rng.normal(size=(2, 3, 16)), jnp.float32)
    rope = Rope(head_dim=16)
    np.testing.assert_array_equal(
        rotate_one(rope, x, jnp.asarray([4, 9], jnp.int32)),
        rope.rotate(x[:, None], jnp.asarray([[4], [9]], jnp.int32))[:, 0],
    )


def test_linear_scaling_divides_positions():
    # theta 10000, D = 4: angles 1 and 0.01 per position; divided by 4.
    frequencies = Rope(head_dim=4, scaling=LinearScaling(factor=4.0)).frequencies()
    np.testing.assert_allclose(frequencies, [0.25, 0.0025], rtol=1e-7)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_ramps_between():
    # theta 4096, D = 6: angles 1, 1/16, 1/256 per position, so wavelengths 2 pi, 32 pi and 512 pi = 6.3, 100.5, 1608.5.
    # Original context 256: shorter than 256 / 4 = 64 stays, longer than 256 / 1 = 256 is divided by 8, and at 100.5
    # the weight of the unscaled angle is (256 / 100.53 - 1) / (4 - 1) = 0.51549.
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=256)
    frequencies = Rope(head_dim=6, theta=4096.0, scaling=scaling).frequencies()
    ramp = (0.51549 + (1 - 0.51549) / 8) / 16
    np.testing.assert_allclose(frequencies, [1.0, ramp, 1 / 256 / 8], rtol=1e-4)


def test_llama_3_1_frequencies_are_those_of_its_reference_code():
    # The loop of `apply_scaling` in meta-llama/llama-models, in plain floats.
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    wanted = []
    for index in range(64):
        frequency = 500000.0 ** (-index / 64)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            wanted.append(frequency)
        elif wavelength > 8192 / 1.0:
            wanted.append(frequency / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            wanted.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    frequencies = Rope(head_dim=128, theta=500000.0, scaling=scaling).frequencies()
    np.testing.assert_allclose(frequencies, wanted, rtol=1e-6)
    assert len({*np.isclose(frequencies, [500000.0 ** (-i / 64) for i in range(64)])}) == 2


@pytest.mark.parametrize("head_dim", [0, 1, 15, -2])
def test_rejects_a_head_size_that_has_no_pairs(head_dim):
    with pytest.raises(ValueError, match=f"`head_dim` must be even and positive for RoPE, got {head_dim}"):
        Rope(head_dim=head_dim)


def test_equal_settings_are_one_static_argument():
    traced = []

    def run(rope, x):
        traced.append(rope)
        return rope.rotate(x, jnp.zeros((1, 1), jnp.int32))

    compiled = jax.jit(run, static_argnums=0)
    for _ in range(2):
        compiled(Rope(head_dim=4, scaling=LinearScaling(factor=2.0)), jnp.ones((1, 1, 1, 4)))
    assert len(traced) == 1


def test_no_rope_leaves_queries_and_keys_as_they_are():
    x = jnp.ones((1, 2, 1, 16))
    np.testing.assert_array_equal(no_rope().rotate(x, jnp.ones((1, 2), jnp.int32)), x)
    assert no_rope() == no_rope()
    assert hash(no_rope()) == hash(no_rope())
