"""The TPU kernels of votes and choice, interpreted against the reference, and compiled."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import pooled_attention, pooled_selection, select_highest
from kvjax_kernels.pooled_attention import tpu

SETTINGS = ("excluded", "kernel", "pooling", "group_reduce", "reduce")
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}

# The interpreter's programs run once: compiling them is most of the time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

attend = jax.jit(pooled_attention, static_argnames=(*SETTINGS, "implementation"), compiler_options=QUICKLY)
select = jax.jit(select_highest, static_argnames=("most", "implementation"), compiler_options=QUICKLY)


def case(lengths, *, window, slots, group, head_dim, dtype="float32") -> tuple[jax.Array, ...]:
    """The last queries of the longest head over tokens without gaps, NaN in the slots behind."""
    lengths = np.asarray(lengths)
    batch, kv_heads = lengths.shape
    rng = np.random.default_rng(slots)
    query = 2 * rng.normal(size=(batch, window, kv_heads * group, head_dim))
    kv = rng.normal(size=(batch, kv_heads, slots, 2 * head_dim))
    key_positions = np.tile(np.arange(slots, dtype=np.int32), (batch, kv_heads, 1))
    key_positions[key_positions >= lengths[..., None]] = -1
    kv[key_positions < 0] = np.nan
    query_positions = np.maximum(lengths.max(1)[:, None] + np.arange(-window, 0), -1).astype(np.int32)
    return *(jnp.asarray(x, dtype) for x in (query, kv)), jnp.asarray(query_positions), jnp.asarray(key_positions)


# Blocks are 1,024 tokens, 2,048 where few queries vote, and all where they fit.
@pytest.mark.parametrize(
    ("head_dim", "group", "window", "slots", "lengths", "dtype", "settings"),
    [
        (64, 3, 32, 300, [[0, 1], [300, 127]], "float32", {"kernel": 7}),
        (80, 1, 5, 37, [[37, 3]], "float32", {"kernel": 3, "group_reduce": "max"}),
        (96, 7, 40, 2100, [[1023, 1025]], "float32", {"kernel": 5, "pooling": "avg", "reduce": "after_pooling"}),
        (128, 4, 64, 2050, [[2048, 2049]], "bfloat16", {"kernel": 3, "group_reduce": "max", "reduce": "after_pooling"}),
        (256, 8, 1, 128, [[128, 0]], "bfloat16", {"kernel": 7, "reduce": "after_pooling"}),
    ],
)
def test_scores_are_those_of_the_reference(head_dim, group, window, slots, lengths, dtype, settings):
    arguments = case(lengths, window=window, slots=slots, group=group, head_dim=head_dim, dtype=dtype)
    settings = {"excluded": window if "kernel" in settings else 0} | settings
    wanted = np.asarray(attend(*arguments, **settings, implementation="reference"), np.float64)
    actual = attend(*arguments, **settings, implementation="tpu-interpret")
    assert actual.dtype == jnp.float32
    assert np.isfinite(actual).all()
    largest = (np.abs(actual - wanted) / np.maximum(wanted, 1e-12)).max()
    assert largest <= LIMITS[dtype], f"the largest relative difference is {largest:.1e}"


@functools.cache
def ranks(kind: str, slots: int) -> jax.Array:
    """Scores of two rows and two heads."""
    rng = np.random.default_rng(slots)
    if kind == "distinct":
        return jnp.asarray(rng.normal(size=(2, 2, slots)), jnp.float32)
    scores = rng.integers(-2, 3, size=(2, 2, slots)).astype(np.float32) / 4
    if kind == "odd":
        for value in (-0.0, 0.0, 1e-40, -1e-41, 1.2e-38, -1.2e-38, np.inf, np.nan):
            scores[rng.random(scores.shape) < 0.08] = value
    if kind == "equal":
        scores[...] = 0.25
    scores[..., :4] = np.inf
    scores[..., slots * 9 // 10 :] = -np.inf
    return jnp.asarray(scores)


@pytest.mark.parametrize("kind", ["distinct", "ties", "odd", "equal"])
@pytest.mark.parametrize(("slots", "most"), [(37, 33), (9000, 700)])
def test_the_set_is_that_of_the_reference(slots, most, kind):
    scores = ranks(kind, slots)
    for counts in ([[most, 0], [1, most - 1]], [[5, most // 2], [most // 3, 4]]):
        given = scores, jnp.asarray(counts, jnp.int32)
        wanted = select(*given, most=most, implementation="reference")
        actual = select(*given, most=most, implementation="tpu-interpret")
        jax.tree.map(np.testing.assert_array_equal, actual, wanted)


def test_keys_are_loaded_at_most_twice():
    block, steps = 1024, 8
    for length in (0, 1, 1023, 1024, 1025, 5000, 8192):
        order = [int(tpu.loaded_block(step, length, block)) for phase in (0, 1) for step in range(steps)]
        # A block that comes again at the next step is not loaded again.
        loads = 1 + sum(a != b for a, b in itertools.pairwise(order))
        assert loads <= max(1, 2 * -(-length // block))


@pytest.mark.parametrize(
    ("query", "kv", "reason"),
    [
        ((1, 4, 8, 64, "float16"), (1, 2, 50, 128, "bfloat16"), "float32 and bfloat16, not float16"),
        ((1, 64, 64, 64, "bfloat16"), (1, 2, 50, 128, "bfloat16"), "at most 1024 queries .* not 2048"),
    ],
)
def test_says_what_the_kernel_cannot_do(query, kv, reason):
    arrays = [jnp.zeros(shape, dtype) for *shape, dtype in (query, kv)]
    arrays += [jnp.zeros(shape, jnp.int32) for shape in (query[:2], kv[:3])]
    with pytest.raises(NotImplementedError, match=f"TPU kernel of `pooled_attention` cannot do this: .*{reason}"):
        attend(*arrays, implementation="tpu")


def test_says_how_many_scores_fit():
    with pytest.raises(NotImplementedError, match="must fit VMEM, 1048576 slots, not 1048577"):
        select_highest(jnp.zeros((1, 1, 2**20 + 1)), jnp.ones((1, 1), jnp.int32), most=4, implementation="tpu")


# SmolLM2, Llama-3.2-1B and Llama-3-70B.
@pytest.mark.parametrize(
    ("chip", "query_heads", "kv_heads", "head_dim", "batch", "slots", "window", "most"),
    [
        ("v5e", 9, 3, 64, 32, 8192, 32, 256),
        ("v6e", 32, 8, 64, 1, 131_072, 64, 2048),
        ("v5p", 64, 8, 128, 1, 131_072, 64, 2048),
    ],
)
def test_compiles_within_memory(compile_for, chip, query_heads, kv_heads, head_dim, batch, slots, window, most):
    run = functools.partial(
        pooled_selection, most=most, sinks=4, excluded=window, kernel=7, pooling="max", implementation="tpu"
    )
    heads = (batch, kv_heads)
    query, kv = (batch, window, query_heads, head_dim), (*heads, slots, 2 * head_dim)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (query[:2], kv[:3], heads, heads)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (query, kv)] + integers

    def whole(query, kv, query_positions, key_positions, counts, recent):
        return run(query, kv, query_positions, key_positions, counts, recent=recent)

    compiled = compile_for(chip, whole, *arrays)
    copied = re.escape(f"bf16[{','.join(map(str, kv))}]") + r"\S* copy"
    assert not re.search(copied, compiled.as_text())
    # Scores only: a few float32 a token and head, where a row of keys and values has hundreds of bytes.
    assert compiled.memory_analysis().temp_size_in_bytes <= 16 * batch * kv_heads * slots
