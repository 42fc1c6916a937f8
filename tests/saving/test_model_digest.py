"""The digest of a model: against NumPy, one changed number at a time, and on several devices."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.saving.model_digest import _array_sums, model_digest


def sums_in_numpy(array):
    """The same sums, one number after another in Python's integers."""
    content = np.ascontiguousarray(array)
    size = min(content.dtype.itemsize, 4)
    words = content.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size]).tolist()
    first = second = 0
    parts = max(content.dtype.itemsize // 4, 1)
    for place, word in enumerate(words):
        index = ((place // parts + 1) * parts + place % parts) % 2**32
        mixed = (word + index * 0x9E3779B9) % 2**32
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B % 2**32
        mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35 % 2**32
        mixed ^= mixed >> 16
        first, second = (first + mixed) % 2**32, (second + mixed * (2 * index + 1)) % 2**32
    return first, second


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (2, 3, 4)])
def test_sums_are_those_of_the_definition(shape, dtype):
    array = jnp.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype)
    assert _array_sums(array) == sums_in_numpy(array)


def test_every_bit_and_every_place_counts():
    values = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    digests = {model_digest([jnp.asarray(values)])}
    for place in np.ndindex(values.shape):
        for bit in (0, 31):
            changed = values.copy()
            changed.view(np.uint32)[place] ^= np.uint32(1 << bit)
            digests.add(model_digest([jnp.asarray(changed)]))
    digests.add(model_digest([jnp.asarray(values[::-1].copy())]))
    digests.add(model_digest([jnp.asarray(values.reshape(6, 4))]))
    digests.add(model_digest([jnp.asarray(values.view(np.int32))]))
    digests.add(model_digest({"x": jnp.asarray(values)}))
    assert len(digests) == 1 + 2 * 24 + 4


def test_a_number_of_python_a_key_and_an_array_without_numbers_have_digests():
    odd = [1.5, np.float32(1.5), jnp.zeros((0, 3)), jax.random.key(0), jnp.ones(3, jnp.int4)]
    assert model_digest(odd) == model_digest(odd)
    assert model_digest(odd) != model_digest([*odd[:-1], jnp.zeros(3, jnp.int4)])


_ON_FOUR_DEVICES = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from kvjax.saving.model_digest import model_digest
array = np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32)
digests = [model_digest([array])]
for kind, specs in ((AxisType.Auto, (P(), P("y", "x"))), (AxisType.Explicit, (P("x"), P(None, "y")))):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    for spec in specs:
        digests.append(model_digest([jax.device_put(array, NamedSharding(mesh, spec))]))
print(len(jax.devices()), len(digests), len(set(digests)))
"""


def test_a_digest_does_not_depend_on_where_the_weights_lie():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", _ON_FOUR_DEVICES], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "4 5 1\n", done.stderr
