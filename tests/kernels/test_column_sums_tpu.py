"""The TPU kernel of `column_sums`: interpreted against the reference, and compiled for chips that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import column_sums
from kvjax_kernels.column_sums import tpu
from kvjax_kernels.column_sums.tiles import NOWHERE, visible_tiles

kernel = jax.jit(functools.partial(tpu.run, query_block=128, key_block=128, interpret=True))


def case(lengths, width, slots, *, head_dim=64, group=3, kv_heads=2, dtype="float32", start=0, poison=True):
    """Queries at `start` onwards, pads behind `lengths`, over rows with a fifth of the slots empty and poisoned."""
    rng = np.random.default_rng(width + slots + head_dim)
    batch = len(lengths)
    offset = np.arange(width)[None]
    query_positions = np.where(offset < np.asarray(lengths)[:, None], start + offset, -1).astype(np.int32)
    key_positions = np.tile(np.arange(slots, dtype=np.int32), (batch, kv_heads, 1))
    key_positions[rng.random(key_positions.shape) < 0.2] = -1
    query = jnp.asarray(rng.normal(size=(batch, width, group * kv_heads, head_dim)), dtype)
    kv = jnp.asarray(rng.normal(size=(batch, kv_heads, slots, 2 * head_dim)), dtype)
    keys = np.repeat(np.asarray(kv[..., :head_dim], np.float64), group, axis=1)
    scores = np.einsum("btnd,bnsd->bnts", np.asarray(query, np.float64), keys) / head_dim**0.5
    columns = np.repeat(key_positions, group, axis=1)[:, :, None]
    seen = (columns >= 0) & (columns <= query_positions[:, None, :, None])
    log_sum_exp = np.log(np.maximum(np.where(seen, np.exp(scores), 0).sum(-1), 1e-300))
    if poison:
        kv = jnp.where((key_positions >= 0)[..., None], kv, jnp.full_like(kv, jnp.nan))
        query = jnp.where((query_positions >= 0)[..., None, None], query, jnp.full_like(query, jnp.nan))
    return query, kv, jnp.asarray(log_sum_exp, jnp.float32), jnp.asarray(query_positions), jnp.asarray(key_positions)


def assert_parity(arguments, limit):
    query, kv, *rest = arguments
    wanted = column_sums(query.astype(jnp.float32), kv.astype(jnp.float32), *rest, implementation="reference")
    actual = np.asarray(kernel(*arguments))
    assert actual.dtype == np.float32
    largest = np.abs(actual - wanted).max() / max(1.0, np.abs(wanted).max())
    print(f"the largest difference is {largest:.1e}")
    assert largest < limit


# Tiles are 128 by 128. In the cases with pads only in the last blocks, and with rows of no token, tiles are skipped.
@pytest.mark.parametrize(("lengths", "width", "slots"), [([1], 1, 1), ([129, 128, 127, 0], 129, 129)])
def test_equals_the_reference_at_every_length(lengths, width, slots):
    assert_parity(case(lengths, width, slots), 1e-5)


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "limit"),
    [
        (64, 1, "bfloat16", 1e-2),
        (80, 3, "float32", 1e-5),
        (96, 4, "bfloat16", 1e-2),
        (128, 7, "bfloat16", 1e-2),
        (256, 8, "float32", 1e-5),
    ],
)
def test_equals_the_reference_at_every_head_size(head_dim, group, dtype, limit):
    assert_parity(case([130], 130, 130, head_dim=head_dim, group=group, kv_heads=1, dtype=dtype), limit)


def test_later_queries_count_for_all_that_is_cached():
    assert_parity(case([130, 20], 130, 300, start=170, kv_heads=1), 1e-5)


def test_tiles_that_no_query_sees_are_neither_loaded_nor_computed():
    positions = jnp.asarray(np.where(np.arange(512) < 300, np.arange(512), -1), jnp.int32)[None]
    columns = jnp.where(positions < 0, NOWHERE, positions)[:, None]
    tiles = visible_tiles(positions, columns, query_block=128, key_block=128)
    # 300 tokens fill blocks 0 to 2: a block of keys is seen from its own block of queries on.
    assert tiles.first.tolist() == [[[0, 1, 2, 4]]]
    assert tiles.last.tolist() == [2]
    assert tiles.last_keys.tolist() == [[2]]


def test_float16_is_refused():
    arguments = case([4], 4, 4, dtype="float16", kv_heads=1, poison=False)
    with pytest.raises(NotImplementedError, match="cannot do this: it takes float32 and bfloat16, got float16"):
        column_sums(*arguments, implementation="tpu-interpret")


@pytest.mark.parametrize(
    ("chip", "batch", "query_heads", "kv_heads", "head_dim", "length"),
    [
        ("v5e", 32, 9, 3, 64, 1024),
        ("v6e", 1, 64, 8, 128, 8192),
        ("v5p", 1, 32, 8, 64, 32768),
    ],
)
def test_compiles_without_a_copy_of_the_rows(compile_for, chip, batch, query_heads, kv_heads, head_dim, length):
    query = jax.ShapeDtypeStruct((batch, length, query_heads, head_dim), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((batch, kv_heads, length, 2 * head_dim), jnp.bfloat16)
    compiled = compile_for(
        chip,
        tpu.run,
        query,
        kv,
        jax.ShapeDtypeStruct((batch, query_heads, length), jnp.float32),
        jax.ShapeDtypeStruct((batch, length), jnp.int32),
        jax.ShapeDtypeStruct((batch, kv_heads, length), jnp.int32),
    )
    rows = f"bf16[{batch},{kv_heads},{length},{2 * head_dim}]"
    assert not [line for line in compiled.as_text().splitlines() if f"= {rows}" in line and " copy(" in line]
    # Queries turned to [B, N, T, D], their head size filled up to whole lanes; and sums and positions.
    turned = batch * query_heads * length * max(head_dim, 128) * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 1.1 * turned
