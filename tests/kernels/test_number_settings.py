"""JAX's settings of numbers change no result: 64 bits, strict promotion (conftest's), and the search for NaN."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import (
    column_sums,
    compact,
    compact_in_place,
    extend_attention,
    join_rows,
    mark_highest,
    pooled_attention,
    pooled_selection,
    prefill_attention,
    ragged_decode_attention,
    select_highest,
    split_rows,
    write_split,
)

# What is compiled runs once.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with jax.enable_x64(True), jax.debug_nans(True):
        yield


def numbers(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def integers(values) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


# Two heads of 64, three queries, sixteen slots, the last two empty: every kernel takes them.
KV, QUERY = numbers(1, 1, 16, 128), numbers(1, 3, 2, 64)
POSITIONS = integers([[3, 9, -1]]), integers([[[*range(14), -1, -1]]])
KEY = KV[..., :64]
TOKEN = {"query": numbers(1, 4, 64), "kv": numbers(1, 16, 128), "lengths": integers([[3, 0]])}
OWN = {"own_key": numbers(1, 2, 64), "own_value": numbers(1, 2, 64)}
DECODES = {
    "equal": {"segments": (8, 8)},
    "unequal": {"segments": (7, 9)},
    "starts": {"starts": integers([[0, 9]])},
    "sinks": {"segments": (7, 9), "sink_query": numbers(1, 4, 64), "sinks": 2},
}


def prompt(window=None, **implementation):
    query, key = numbers(1, 128, 2, 64), numbers(1, 128, 1, 64)
    return prefill_attention(query, key, key, window=window, log_sum_exp=True, **implementation)


def decode(name: str, *, token_attention: bool, **implementation):
    return ragged_decode_attention(**TOKEN, **OWN, **DECODES[name], token_attention=token_attention, **implementation)


def decode_split(**implementation):
    rows = split_rows(TOKEN["kv"], (7, 9))
    rows = write_split(rows, (7, 9), integers([[3, -1]]), *OWN.values())
    arrays = {"query": TOKEN["query"], "kv": rows, "lengths": TOKEN["lengths"]}
    result = ragged_decode_attention(**arrays, segments=(7, 9), token_attention=True, **implementation)
    return result, join_rows(rows, (7, 9)), mark_highest(KV[..., 0], integers([[3]]))


RUNS = {
    "prefill": prompt,
    "prefill_window": functools.partial(prompt, window=5),
    "extend": functools.partial(extend_attention, QUERY, KEY, KEY, *POSITIONS),
    "column_sums": functools.partial(column_sums, QUERY, KV, jnp.ones((1, 2, 3), jnp.float32), *POSITIONS),
    "pooled": functools.partial(pooled_attention, QUERY, KV, *POSITIONS, kernel=3, excluded=1),
    "pooled_selection": functools.partial(
        pooled_selection,
        *(QUERY, KV, *POSITIONS, integers([[3]])),
        most=5,
        sinks=1,
        recent=integers([[1]]),
        kernel=3,
        pooling="avg",
        group_reduce="max",
        reduce="after_pooling",
    ),
    "select": functools.partial(select_highest, KV[..., 0], integers([[3]]), most=5),
    "compact": functools.partial(compact, KV[:, 0], integers([[3, 5, -1]])),
    "compact_in_place": functools.partial(
        compact_in_place, KV.reshape(2, 8, 128), integers([[1, 0]]), integers([[3, 5, -1]])
    ),
    **{
        f"decode_{name}_{wanted}": functools.partial(decode, name, token_attention=wanted == "attention")
        for name, wanted in itertools.product(DECODES, ("output", "attention"))
        if name != "equal" or wanted == "attention"
    },
    "decode_split": decode_split,
}


@pytest.mark.parametrize("name", RUNS)
def test_results_and_their_types_are_those_of_32_bits(name):
    run = RUNS[name]
    with jax.enable_x64(False):
        shapes = jax.eval_shape(functools.partial(run, implementation="xla"))
    found = [
        jax.jit(functools.partial(run, implementation=implementation), compiler_options=QUICKLY)()
        for implementation in ("reference", "xla")
    ]
    for reference, xla, shape in zip(*map(jax.tree.leaves, (*found, shapes)), strict=True):
        assert reference.dtype == xla.dtype == shape.dtype
        np.testing.assert_allclose(xla, reference, atol=1e-5)


@pytest.mark.parametrize("implementation", ["tpu-interpret", "gpu-interpret"])
@pytest.mark.parametrize("name", ["compact", "select"])
def test_kernels_run_under_64_bits(name, implementation):
    actual = jax.jit(functools.partial(RUNS[name], implementation=implementation), compiler_options=QUICKLY)()
    wanted = RUNS[name](implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, actual, wanted)
    assert [x.dtype for x in jax.tree.leaves(actual)] == [x.dtype for x in jax.tree.leaves(wanted)]


@pytest.mark.parametrize(("chip", "implementation"), [("v5e", "tpu"), ("h100", "gpu")])
def test_kernels_compile_under_64_bits(compile_for, chip, implementation):
    def shape(*sizes: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    # Positions and counts as a caller has them under this setting.
    integers = functools.partial(shape, dtype="int64")

    def step(query, kv, query_positions, key_positions, counts):
        index, _ = pooled_selection(
            *(query, kv, query_positions, key_positions, counts),
            most=128,
            sinks=4,
            recent=counts,
            kernel=7,
            implementation=implementation,
        )
        packed = compact(kv[:, 0], index[:, 0], implementation=implementation)
        lengths = counts.at[:, :1].get()
        settings = {"segments": (128,), "token_attention": True, "implementation": implementation}
        return ragged_decode_attention(query[:, 0, :4], packed, lengths, **settings)

    arrays = shape(1, 32, 8, 128), shape(1, 2, 1024, 256), integers(1, 32), integers(1, 2, 1024), integers(1, 2)
    text = compile_for(chip, step, *arrays).as_text()
    assert text.count("custom-call") >= 4
