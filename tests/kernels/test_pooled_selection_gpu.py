"""The GPU kernels of votes and choice, interpreted against the reference, and compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import mosaic_gpu, pooled_attention, pooled_selection, select_highest

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


# Blocks are 128 keys, 64 at head size 256. At 1,100 slots a head is shared out over two blocks of threads.
@pytest.mark.parametrize(
    ("head_dim", "group", "window", "slots", "lengths", "dtype", "settings"),
    [
        (64, 3, 32, 300, [[0, 1], [300, 127]], "float32", {"kernel": 7}),
        (96, 7, 33, 130, [[129, 128]], "float32", {"kernel": 3, "group_reduce": "max"}),
        (128, 2, 70, 1100, [[1100]], "bfloat16", {"kernel": 5, "pooling": "avg", "group_reduce": "max"}),
        (256, 8, 9, 72, [[65, 64]], "float32", {"kernel": 5, "reduce": "after_pooling"}),
    ],
)
def test_scores_are_those_of_the_reference(head_dim, group, window, slots, lengths, dtype, settings):
    arguments = case(lengths, window=window, slots=slots, group=group, head_dim=head_dim, dtype=dtype)
    settings = {"excluded": min(window, 8) if "kernel" in settings else 0} | settings
    wanted = np.asarray(attend(*arguments, **settings, implementation="reference"), np.float64)
    actual = attend(*arguments, **settings, implementation="gpu-interpret")
    assert actual.dtype == jnp.float32
    assert np.isfinite(actual).all()
    largest = (np.abs(actual - wanted) / np.maximum(wanted, 1e-12)).max()
    assert largest <= LIMITS[dtype], f"the largest relative difference is {largest:.1e}"
    assert mosaic_gpu.count_parts(1, -(-1100 // 128), thread_blocks=4) == 2


@functools.cache
def ranks(kind: str) -> jax.Array:
    """Scores of two heads, of more tiles than are in flight at once."""
    rng = np.random.default_rng(0)
    if kind == "distinct":
        return jnp.asarray(rng.normal(size=(1, 2, 11_000)), jnp.float32)
    scores = rng.integers(-2, 3, size=(1, 2, 11_000)).astype(np.float32) / 4
    if kind == "odd":
        for value in (-0.0, 0.0, 1e-40, -1e-41, 1.2e-38, -1.2e-38, np.inf, np.nan):
            scores[rng.random(scores.shape) < 0.08] = value
    if kind == "equal":
        scores[...] = 0.25
    scores[..., :4] = np.inf
    scores[..., 10_000:] = -np.inf
    return jnp.asarray(scores)


@pytest.mark.parametrize("kind", ["distinct", "ties", "odd", "equal"])
def test_the_set_is_that_of_the_reference(kind):
    for counts in ([[700, 0]], [[1, 350]]):
        given = ranks(kind), jnp.asarray(counts, jnp.int32)
        wanted = select(*given, most=700, implementation="reference")
        actual = select(*given, most=700, implementation="gpu-interpret")
        jax.tree.map(np.testing.assert_array_equal, actual, wanted)


@pytest.mark.parametrize(
    ("query", "kv", "reason"),
    [
        ((1, 4, 8, 64, "float32"), (1, 2, 50, 128, "float32"), "take bfloat16 or float16, not float32"),
        ((1, 4, 8, 80, "bfloat16"), (1, 2, 50, 160, "bfloat16"), "a multiple of 32 up to 256, not 80"),
        ((1, 64, 64, 128, "bfloat16"), (1, 2, 50, 256, "bfloat16"), "at most 512 queries .* not 2048"),
    ],
)
def test_says_what_the_kernel_cannot_do(query, kv, reason):
    arrays = [jnp.zeros(shape, dtype) for *shape, dtype in (query, kv)]
    arrays += [jnp.zeros(shape, jnp.int32) for shape in (query[:2], kv[:3])]
    with pytest.raises(NotImplementedError, match=f"GPU kernel of `pooled_attention` cannot do this: .*{reason}"):
        attend(*arrays, implementation="gpu")


# Llama-3-70B, and SmolLM2 with a number of slots that no tile divides.
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim", "batch", "slots", "window", "settings"),
    [
        (64, 8, 128, 1, 131_072, 64, {}),
        (9, 3, 64, 32, 8191, 32, {"group_reduce": "max", "reduce": "after_pooling"}),
    ],
)
def test_compiles_within_memory(compile_for, query_heads, kv_heads, head_dim, batch, slots, window, settings):
    settings = {"most": 256, "sinks": 4, "excluded": window, "kernel": 7, "implementation": "gpu"} | settings
    query, kv = (batch, window, query_heads, head_dim), (batch, kv_heads, slots, 2 * head_dim)
    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (query[:2], kv[:3], kv[:2], kv[:2])]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (query, kv)] + integers

    def whole(query, kv, query_positions, key_positions, counts, recent):
        return pooled_selection(query, kv, query_positions, key_positions, counts, recent=recent, **settings)

    compiled = compile_for("h100", whole, *arrays)
    assert not re.search(re.escape(f"bf16[{','.join(map(str, kv))}]") + r"\S* (copy|fusion)", compiled.as_text())
    # A few numbers a token and head, where a row has hundreds of bytes; and the queries.
    few = 32 * batch * kv_heads * slots + 8 * batch * query_heads * window * head_dim
    assert slots % 8 or compiled.memory_analysis().temp_size_in_bytes <= few
