"""Policies and rotations as data: what is compared, what is given back, and what no file can have made."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.rope import LinearScaling, Rope, no_rope
from kvjax.saving.settings import as_data, policy_from_data, rotation_data, same_rotation, shown

PATTERN = kvjax.HeadPattern.of([[0.25, 1.0]], sinks=4)
OWN = [
    kvjax.Full(),
    kvjax.StreamingLLM(budget=16),
    kvjax.H2O(budget=0.25, allocation=kvjax.Pyramid(beta=7, schedule="geometric")),
    kvjax.SnapKV.kvpress(compression_ratio=0.5),
    kvjax.PyramidKV(budget=64),
    kvjax.AdaKV.over(kvjax.TOVA(budget=64, evict="prompt", allocation=kvjax.Pyramid())),
    kvjax.Knorm(budget=64),
    kvjax.ExpectedAttention(budget=64),
    kvjax.DuoAttention(pattern=PATTERN, threshold=0.5),
    kvjax.DuoAttention(),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(kvjax.Knorm):
    """A policy of somebody's own."""

    strength: object = 1.0


@pytest.mark.parametrize("policy", OWN, ids=lambda policy: type(policy).__name__)
def test_policies_of_kvjax_come_back_from_data(policy):
    again = policy_from_data(as_data(policy, what="`policy`"))
    assert again == policy
    assert type(again) is type(policy)
    assert hash(again) == hash(policy)


@pytest.mark.usefixtures("no_shape_checks")
def test_numbers_of_numpy_are_pythons():
    plain, numpy = kvjax.SnapKV(budget=64, window=4), kvjax.SnapKV(budget=64, window=np.int64(4))  # pyright: ignore
    assert as_data(plain, what="`policy`") == as_data(numpy, what="`policy`")


def test_a_policy_of_ones_own_is_data_but_never_looked_up():
    data = as_data(Mine(budget=16), what="`policy`")
    assert policy_from_data(data) is None
    assert shown(data, None).startswith("Mine(budget=16")
    nested = as_data(kvjax.H2O(budget=16), what="`policy`")
    nested["fields"]["allocation"] = data
    assert policy_from_data(nested) is None
    with pytest.raises(ValueError, match=r"`policy`: `strength` of Mine must be a number, a text, .*, got function"):
        as_data(Mine(budget=16, strength=lambda: 1), what="`policy`")


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    "data",
    [
        {"class": "kvjax.HeadPattern", "fields": {"scores": [[0.5]]}},
        {"class": "kvjax.H2O", "fields": {}},
        {"class": "kvjax.H2O", "fields": []},
        {"class": "kvjax.H2O", "fields": {"budget": {"class": "kvjax.Full", "fields": {}}}},
        {"class": "kvjax.H2O", "fields": {"budget": 8}, "more": 1},
        {"class": "kvjax.DuoAttention", "fields": {"pattern": {"class": "kvjax.HeadPattern", "fields": {"scores": 3}}}},
        [],
        None,
    ],
)
def test_what_is_no_policy_is_not_made(data):
    with pytest.raises((ValueError, TypeError)):
        policy_from_data(data)


class Table:
    """A rotation with neither repr nor settings: its angles lie in an array."""

    def __init__(self, theta):
        self.angles = theta ** -np.linspace(0, 1, 8)

    def __eq__(self, other):
        return isinstance(other, Table) and bool((self.angles == other.angles).all())

    def __hash__(self):
        return hash(self.angles.tobytes())

    def rotate(self, x, positions):
        angle = positions[..., None].astype(jnp.float32) * jnp.asarray(self.angles, jnp.float32)[None, None]
        cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def test_rotations_are_told_apart_by_their_settings_or_by_what_they_do():
    scaled = Rope(head_dim=16, scaling=LinearScaling(factor=2.0))
    rotations = [Rope(head_dim=16), Rope(head_dim=16, theta=10001.0), scaled, no_rope(), Table(1e4), Table(10001.0)]
    again = [Rope(head_dim=16), Rope(head_dim=16, theta=np.float64(10001)), scaled, no_rope(), Table(1e4)]
    data = [rotation_data(rope, head_dim=16) for rope in rotations]  # pyright: ignore[reportArgumentType]
    for index, rope in enumerate(again):
        theirs = rotation_data(rope, head_dim=16)  # pyright: ignore[reportArgumentType]
        assert [same_rotation(mine, theirs) for mine in data] == [index == other for other in range(len(data))]
    for damaged in (None, {}, {"rotated": "x"}, {"rotated": [[1], 2]}, {"rotated": []}):
        assert not same_rotation(damaged, data[4])
