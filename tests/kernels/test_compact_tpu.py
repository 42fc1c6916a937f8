"""The TPU kernels of `compact`: interpreted against the reference, and compiled for chips that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import compact, compact_in_place
from kvjax_kernels.compact import reference, tpu
from kvjax_kernels.compact_in_place import reference as in_place_reference
from kvjax_kernels.compact_in_place import tpu as in_place

interpreted = jax.jit(functools.partial(tpu.run, tile=16, interpret=True))
interpreted_in_place = jax.jit(functools.partial(in_place.run, tile=16, interpret=True))


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


# Rows of heads of 64, 80, 96, 128 and 256. A tile has 16 rows here.
@pytest.mark.parametrize(
    ("dtype", "width", "count"),
    [
        ("bfloat16", 128, 1),
        ("float32", 256, 17),
        ("bfloat16", 160, 15),
        ("float32", 192, 16),
        ("bfloat16", 512, 40),
    ],
)
def test_rows_are_those_of_the_reference_bit_by_bit(dtype, width, count):
    rng = np.random.default_rng(width + count)
    rows = jnp.asarray(rng.normal(size=(2, 60, width)), dtype).at[:, ::3].set(jnp.nan)
    source = np.sort([rng.permutation(60)[:count] for _ in range(2)], axis=1).astype(np.int32)
    # The last row's first tile, where it is whole, is all gaps.
    source[0, count * 5 // 6 :], source[1, : min(count // 2, 16)] = -1, -1
    arguments = rows, jnp.asarray(source)
    np.testing.assert_array_equal(bits(interpreted(*arguments)), bits(reference.run(*arguments)))


@pytest.mark.parametrize(("dtype", "width", "size"), [("bfloat16", 128, 24), ("float32", 192, 72)])
def test_pages_are_those_of_the_reference_bit_by_bit(dtype, width, size):
    rng = np.random.default_rng(size)
    held, kept = (70, 21, 0), (50, 21, 0)
    most = -(-70 // size)
    table = rng.permutation(3 * most).reshape(3, most).astype(np.int32)
    table[1, -(-21 // size) :], table[2] = -1, -1
    source = np.full((3, 53), -1, np.int32)
    for head in range(3):
        source[head, : kept[head]] = np.sort(rng.permutation(held[head])[: kept[head]])
    pages = jnp.asarray(rng.normal(size=(3 * most, size, width)), dtype).at[:, ::5].set(jnp.nan)
    arguments = pages, jnp.asarray(table), jnp.asarray(source)
    np.testing.assert_array_equal(bits(interpreted_in_place(*arguments)), bits(in_place_reference.run(*arguments)))


@pytest.mark.usefixtures("no_shape_checks")
def test_says_what_it_cannot_do():
    source, table = jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="takes float32 and bfloat16, got float16"):
        compact(jnp.zeros((1, 8, 128), jnp.float16), source, implementation="tpu-interpret")
    with pytest.raises(NotImplementedError, match="7 rows are not whole pairs"):
        compact(jnp.zeros((1, 7, 128), jnp.bfloat16), source, implementation="tpu-interpret")
    with pytest.raises(NotImplementedError, match="pages must have a multiple of 8 slots, got 12"):
        compact_in_place(jnp.zeros((1, 12, 128)), table, source, implementation="tpu-interpret")


# A layer of SmolLM2, Llama 3.2 1B, and Llama 3.1 8B.
@pytest.mark.parametrize(
    ("chip", "batch", "rows", "kept", "width"),
    [
        ("v5e", 32, 3 * 8192, 3 * 1024, 128),
        ("v6e", 1, 8 * 131072, 8 * 2048, 128),
        ("v5p", 1, 8 * 131072, 8 * 2048, 256),
    ],
)
def test_compiles_without_a_copy_of_the_rows(compile_for, chip, batch, rows, kept, width):
    cache = jax.ShapeDtypeStruct((batch, rows, width), jnp.bfloat16)
    compiled = compile_for(chip, tpu.run, cache, jax.ShapeDtypeStruct((batch, kept), jnp.int32))
    text = f"= bf16[{batch},{rows},{width}]"
    assert not [line for line in compiled.as_text().splitlines() if text in line and " copy(" in line]
    assert compiled.memory_analysis().temp_size_in_bytes < 0.02 * batch * rows * width * 2


@pytest.mark.parametrize(("chip", "pages", "size", "width"), [("v5e", 24 * 512, 16, 128), ("v5p", 8, 65536 + 64, 256)])
def test_pages_are_compacted_where_they_lie(compile_for, chip, pages, size, width):
    heads = 8
    table = jax.ShapeDtypeStruct((heads, pages // heads), jnp.int32)
    source = jax.ShapeDtypeStruct((heads, 2048), jnp.int32)
    cache = jax.ShapeDtypeStruct((pages, size, width), jnp.bfloat16)
    memory = compile_for(chip, in_place.run, cache, table, source, donate_argnums=0).memory_analysis()
    total = pages * size * width * 2
    assert memory.alias_size_in_bytes == total
    assert memory.temp_size_in_bytes < 0.05 * total
