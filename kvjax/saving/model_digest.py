"""A digest of a model's weights: the same wherever they lie, and another if a single number changes."""

import functools
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt32

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


def model_digest(params: object) -> str:
    """A digest of all arrays of a model: their places in the tree, shapes, dtypes and bits.

    Computed where the arrays lie, shard by shard, so that nothing but a few numbers leaves an accelerator; a sum of
    integers, so that it depends on neither device, sharding nor order. A single changed number always changes it,
    and several all but certainly; it is no protection against someone who means to deceive.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        about = (jax.tree_util.keystr(path), array.shape, array.dtype.name, _array_sums(array))
        digest.update(repr(about).encode())
    return digest.hexdigest()


def _array_sums(array: jax.Array) -> tuple[int, int]:
    """The sums of all different shards."""
    strides = tuple(math.prod(array.shape[axis + 1 :]) % 2**32 for axis in range(array.ndim))
    shards = {str(shard.index): shard for shard in array.addressable_shards}
    sums = [np.zeros(2)]
    for shard in (shard for shard in shards.values() if shard.data.size):
        first = np.asarray([part.indices(size)[0] for part, size in zip(shard.index, array.shape, strict=True)])
        sums.append(_sums(shard.data, jnp.asarray(first.astype(np.uint32)), strides))
    first, second = np.asarray(sums, np.uint64).reshape(-1, 2).sum(0) % 2**32
    return int(first), int(second)


@functools.partial(jax.jit, static_argnames="strides")
def _sums(x: Shaped[Array, "*shape"], first: UInt32[Array, "axes"], strides: tuple[int, ...]) -> UInt32[Array, "2"]:
    """Two sums modulo 2^32 over the bits of a shard's numbers, each mixed with its index in the whole array.

    Both the mixing and the odd factor are one-to-one, so no change of one number leaves either sum as it was.

    Args:
        x: the shard.
        first: its first index along each axis.
        strides: of the whole array, in numbers.
    """
    index = jnp.full(x.shape, 1, jnp.uint32)
    for axis, stride in enumerate(strides):
        along = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) + first[axis]
        index = index + along * np.uint32(stride)
    words = _words(x).reshape(*x.shape, -1)
    part = jax.lax.broadcasted_iota(jnp.uint32, words.shape, x.ndim)
    index = index[..., None] * np.uint32(words.shape[-1]) + part
    # The finalizer of MurmurHash3.
    mixed = words + index * np.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> np.uint32(16))
    weighted = mixed * (index * np.uint32(2) + np.uint32(1))
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(weighted, dtype=jnp.uint32)])


def _words(x: Array) -> UInt32[Array, "..."]:
    """The bits of each number as one integer, or as several along further axes."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _words(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jax.dtypes.itemsize_bits(x.dtype) < 8:
        x = x.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
