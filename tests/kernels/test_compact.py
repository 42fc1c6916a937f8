"""Kept rows moved together: what every implementation does, and plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import compact, compact_in_place


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def paged(rng, *, size, width, dtype, held=(70, 37, 0), kept=(50, 37, 0)):
    """Heads with so many tokens in pages of `size`, scattered in no order, and the slots that they keep."""
    most = -(-max(held) // size)
    pages = rng.normal(size=(most * len(held), size, width))
    order = rng.permutation(len(pages))
    table = np.full((len(held), most), -1, np.int32)
    source = np.full((len(held), max(kept) + 3), -1, np.int32)
    for head, (tokens, left) in enumerate(zip(held, kept, strict=True)):
        number = -(-tokens // size)
        table[head, :number], order = order[:number], order[number:]
        source[head, :left] = np.sort(rng.permutation(tokens)[:left])
    return jnp.asarray(pages, dtype), jnp.asarray(table), jnp.asarray(source)


def moved(pages, table, source):
    old, new, size = np.asarray(pages), np.array(pages), pages.shape[1]
    for pages_of_head, slots in zip(np.asarray(table), np.asarray(source), strict=True):
        for target, slot in enumerate(slots):
            if slot >= 0:
                new[pages_of_head[target // size], target % size] = old[pages_of_head[slot // size], slot % size]
    return new


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_are_those_at_their_source_bit_by_bit(implementation, dtype):
    rng = np.random.default_rng(0)
    rows = np.array(jnp.asarray(rng.normal(size=(3, 20, 8)), dtype))
    source = np.array([[3, 5, 19, -1], [0, 0, -1, 7], [-1, -1, -1, -1]], np.int32)
    wanted = np.where(source[..., None] < 0, np.zeros((), rows.dtype), rows[np.arange(3)[:, None], source])
    # Rows that nobody keeps may hold anything.
    rows[2] = rows[0, 6] = np.nan
    actual = compact(jnp.asarray(rows), jnp.asarray(source), implementation=implementation)
    np.testing.assert_array_equal(bits(actual), bits(wanted))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("size", "dtype"), [(1, "float32"), (16, "bfloat16"), (70, "float32")])
def test_heads_rows_move_to_the_front_of_their_own_pages(implementation, size, dtype):
    arguments = paged(np.random.default_rng(size), size=size, width=8, dtype=dtype)
    actual = jax.jit(compact_in_place, static_argnames="implementation")(*arguments, implementation=implementation)
    np.testing.assert_array_equal(bits(actual), bits(moved(*arguments)))


def test_chunks_are_moved_in_order():
    # More rows than move at a time, all of them one slot down.
    source = np.arange(1, 600, dtype=np.int32)[None]
    arguments = jnp.arange(600.0)[None, :, None], jnp.zeros((1, 1), jnp.int32), jnp.asarray(source)
    actual = jax.jit(compact_in_place)(*arguments)
    np.testing.assert_array_equal(actual[0, :, 0], [*range(1, 600), 599])


def test_donated_pages_are_not_held_twice():
    pages = jax.ShapeDtypeStruct((1024, 16, 128), jnp.float32)
    table, source = (jax.ShapeDtypeStruct((8, count), jnp.int32) for count in (128, 2048))
    memory = jax.jit(compact_in_place, donate_argnums=0).lower(pages, table, source).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 1024 * 16 * 128 * 4
    # The rows that are on their way, and where they go.
    assert memory.temp_size_in_bytes < 3 * 2**20


def test_no_rows_are_none():
    pages, table, source = jnp.ones((2, 8, 4)), jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 0), jnp.int32)
    assert compact(pages, source).shape == (2, 0, 4)
    np.testing.assert_array_equal(compact_in_place(pages, table, source), pages)
    with pytest.raises(NotImplementedError, match="cannot do this: there are no rows to move"):
        compact(pages, source, implementation="tpu-interpret")


@pytest.mark.usefixtures("no_shape_checks")
def test_says_which_argument_does_not_fit():
    rows, source = jnp.zeros((2, 8, 4)), jnp.zeros((3, 5), jnp.int32)
    with pytest.raises(ValueError, match=r"`rows` \[B, M, W\] and `source` \[B, C\] must agree, got \(2, 8, 4\)"):
        compact(rows, source)
    with pytest.raises(ValueError, match=r"must agree, and C not exceed N R, got \(2, 8, 4\), \(3, 0\) and \(3, 5\)"):
        compact_in_place(rows, source[:, :0], source)
    magic: Any = "magic"
    with pytest.raises(ValueError, match=r"`implementation` must be .* got 'magic'"):
        compact(rows, source[:2], implementation=magic)
