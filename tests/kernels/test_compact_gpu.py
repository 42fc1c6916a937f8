"""The GPU kernels of `compact`: interpreted against the reference, and compiled for a chip that is not there."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import compact
from kvjax_kernels.compact import gpu, reference
from kvjax_kernels.compact_in_place import gpu as in_place
from kvjax_kernels.compact_in_place import reference as in_place_reference

interpreted = jax.jit(functools.partial(gpu.run, interpret=True))
interpreted_in_place = jax.jit(functools.partial(in_place.run, interpret=True))


def bits(x) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


# A tile has 64 rows.
@pytest.mark.parametrize(
    ("dtype", "width", "count"),
    [("bfloat16", 128, 1), ("float32", 160, 64), ("bfloat16", 512, 66)],
)
def test_rows_are_those_of_the_reference_bit_by_bit(dtype, width, count):
    rng = np.random.default_rng(width + count)
    rows = jnp.asarray(rng.normal(size=(2, 200, width)), dtype).at[:, ::3].set(jnp.nan)
    source = np.sort([rng.permutation(200)[:count] for _ in range(2)], axis=1).astype(np.int32)
    source[0, count * 5 // 6 :], source[1, : count // 2] = -1, -1
    arguments = rows, jnp.asarray(source)
    np.testing.assert_array_equal(bits(interpreted(*arguments)), bits(reference.run(*arguments)))


@pytest.mark.parametrize(("dtype", "width", "size"), [("bfloat16", 128, 16), ("float32", 32, 90)])
def test_pages_are_those_of_the_reference_bit_by_bit(dtype, width, size):
    rng = np.random.default_rng(size)
    held, kept = (90, 37, 0), (70, 37, 0)
    most = -(-90 // size)
    table = rng.permutation(3 * most).reshape(3, most).astype(np.int32)
    table[1, -(-37 // size) :], table[2] = -1, -1
    source = np.full((3, 73), -1, np.int32)
    for head in range(3):
        source[head, : kept[head]] = np.sort(rng.permutation(held[head])[: kept[head]])
    pages = jnp.asarray(rng.normal(size=(3 * most, size, width)), dtype).at[:, ::5].set(jnp.nan)
    arguments = pages, jnp.asarray(table), jnp.asarray(source)
    np.testing.assert_array_equal(bits(interpreted_in_place(*arguments)), bits(in_place_reference.run(*arguments)))


def test_says_what_it_cannot_do():
    with pytest.raises(NotImplementedError, match="rows must be a multiple of 128 bytes, got 320"):
        compact(jnp.zeros((1, 8, 160), jnp.bfloat16), jnp.zeros((1, 4), jnp.int32), implementation="gpu-interpret")


def registers(report: str) -> int:
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", report), report
    return int(re.findall(r"Used (\d+) registers", report)[-1])


# A layer of SmolLM2, Llama 3.2 1B, and Llama 3.1 8B.
@pytest.mark.parametrize(
    ("batch", "rows", "kept", "width"),
    [(32, 3 * 8192, 3 * 1024, 128), (1, 8 * 131072, 8 * 2048, 128), (1, 8 * 131072, 8 * 2048 + 5, 256)],
)
def test_compiles_without_a_copy_or_a_spill(compile_for, capfd, monkeypatch, batch, rows, kept, width):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    cache = jax.ShapeDtypeStruct((batch, rows, width), jnp.bfloat16)
    compiled = compile_for("h100", gpu.run, cache, jax.ShapeDtypeStruct((batch, kept), jnp.int32))
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * batch * rows * width * 2
    assert registers(capfd.readouterr().out) < 64


@pytest.mark.parametrize(("pages", "size", "width"), [(8 * 2048, 16, 256), (8, 65536 + 37, 128)])
def test_pages_are_compacted_where_they_lie(compile_for, capfd, monkeypatch, pages, size, width):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    table = jax.ShapeDtypeStruct((8, pages // 8), jnp.int32)
    source = jax.ShapeDtypeStruct((8, 2048), jnp.int32)
    cache = jax.ShapeDtypeStruct((pages, size, width), jnp.bfloat16)
    memory = compile_for("h100", in_place.run, cache, table, source, donate_argnums=0).memory_analysis()
    total = pages * size * width * 2
    assert memory.alias_size_in_bytes == total
    assert memory.temp_size_in_bytes < 0.01 * total
    assert registers(capfd.readouterr().out) < 64
