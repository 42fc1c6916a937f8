"""The GPU kernel of `column_sums`: interpreted against the reference, and compiled for a chip that is not there."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import column_sums
from kvjax_kernels.column_sums import gpu

kernel = jax.jit(functools.partial(gpu.run, interpret=True))


def case(lengths, slots, *, head_dim, group, dtype, start=0) -> tuple[jax.Array, ...]:
    """One KV head's queries at `start` onwards, pads behind `lengths`; a fifth of the slots are empty; poison there."""
    rng = np.random.default_rng(slots + head_dim)
    width = max(lengths)
    places = np.where(np.arange(width) < np.asarray(lengths)[:, None], start + np.arange(width), -1).astype(np.int32)
    columns = np.where(rng.random((len(lengths), 1, slots)) < 0.2, -1, np.arange(slots)).astype(np.int32)
    query = np.asarray(jnp.asarray(rng.normal(size=(len(lengths), width, group, head_dim)), dtype), np.float64)
    kv = np.asarray(jnp.asarray(rng.normal(size=(*columns.shape, 2 * head_dim)), dtype), np.float64)
    scores = np.einsum("btnd,bsd->bnts", query, kv[:, 0, :, :head_dim]) / head_dim**0.5
    seen = (columns[:, :, None] >= 0) & (columns[:, :, None] <= places[:, None, :, None])
    log_sum_exp = np.log(np.maximum(np.where(seen, np.exp(scores), 0).sum(-1), 1e-300))
    query[places < 0], kv[columns < 0] = np.nan, np.nan
    positions = jnp.asarray(places), jnp.asarray(columns)
    return jnp.asarray(query, dtype), jnp.asarray(kv, dtype), jnp.asarray(log_sum_exp, jnp.float32), *positions


# Tiles are 128 keys by 128 queries, of heads of 256 by 64.
@pytest.mark.parametrize(
    ("lengths", "slots", "start", "head_dim", "group", "dtype", "limit"),
    [
        ([1], 1, 0, 64, 1, "float32", 1e-5),
        ([129, 128, 0], 129, 0, 64, 3, "float32", 1e-5),
        ([40, 3], 300, 260, 96, 4, "bfloat16", 1e-2),
        ([127], 127, 0, 128, 7, "bfloat16", 1e-2),
        ([128], 128, 0, 256, 8, "float16", 1e-2),
    ],
)
def test_equals_the_reference(lengths, slots, start, head_dim, group, dtype, limit):
    query, kv, *rest = case(lengths, slots, start=start, head_dim=head_dim, group=group, dtype=dtype)
    wanted = column_sums(query.astype(jnp.float32), kv.astype(jnp.float32), *rest, implementation="reference")
    actual = np.asarray(kernel(query, kv, *rest))
    assert actual.dtype == np.float32
    largest = np.abs(actual - wanted).max() / max(1.0, np.abs(wanted).max())
    print(f"the largest difference is {largest:.1e}")
    assert largest < limit


def test_says_what_it_cannot_do():
    arguments = case([4], 4, head_dim=80, group=1, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="head size must be a multiple of 32 up to 256, not 80"):
        column_sums(*arguments, implementation="gpu-interpret")
    arguments = case([4], 4, head_dim=64, group=1, dtype="float32")
    with pytest.raises(NotImplementedError, match="take bfloat16 or float16, not float32"):
        column_sums(*arguments, implementation="gpu")


@pytest.mark.parametrize(
    ("batch", "query_heads", "kv_heads", "head_dim", "length"),
    [(32, 9, 3, 64, 8192), (1, 64, 8, 128, 131072), (1, 8, 1, 256, 8192), (1, 4, 2, 96, 1001)],
)
def test_compiles_without_a_copy_or_a_spill(
    compile_for, capfd, monkeypatch, batch, query_heads, kv_heads, head_dim, length
):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    kv = jax.ShapeDtypeStruct((batch, kv_heads, length, 2 * head_dim), jnp.bfloat16)
    compiled = compile_for(
        "h100",
        gpu.run,
        jax.ShapeDtypeStruct((batch, length, query_heads, head_dim), jnp.bfloat16),
        kv,
        jax.ShapeDtypeStruct((batch, query_heads, length), jnp.float32),
        jax.ShapeDtypeStruct((batch, length), jnp.int32),
        jax.ShapeDtypeStruct((batch, kv_heads, length), jnp.int32),
    )
    # Positions, sums and log-sum-exps; nothing as large as queries or rows, where they are whole tiles of 8.
    most = 0.1 if length % 8 == 0 else 3
    assert compiled.memory_analysis().temp_size_in_bytes < most * kv.size * 2
    report = capfd.readouterr().out
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", report), report
    assert int(re.findall(r"Used (\d+) registers", report)[-1]) <= 255
