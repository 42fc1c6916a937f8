"""The TPU kernel: interpreted against the reference with races detected, and compiled for chips that are not there."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import ragged_decode_attention
from kvjax_kernels.ragged_decode_attention import tpu, tpu_plan, traffic
from kvjax_kernels.split_rows import head_starts

BLOCK = 128
UNOPTIMISED = {"xla_backend_optimization_level": 0}
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
# Nothing, one token, around a block, full, and more blocks than there are buffers.
EQUAL, LENGTHS = (384, 384, 384), [[0, 1, 127], [128, 129, 384]]
# No multiple of any tile, nor is their sum, and a head of one slot.
UNEQUAL, UNEQUAL_LENGTHS = (37, 1, 1100), [[37, 0, 1099], [8, 1, 90]]
# Heads meet in one tile or leave gaps; one is empty, one ends at the last slot.
STARTS, STARTED_LENGTHS = [[0, 600, 600], [7, 8, 640]], [[600, 0, 68], [1, 292, 128]]
STARTED_SLOTS = 768


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 128 slots, so that small caches have many."""
    monkeypatch.setattr(tpu_plan, "_BLOCK_BYTES", 1)


@functools.cache
def arrays(head_dim: int, group: int, slots: int, dtype: str, rows: int = 2, kv_heads: int = 3):
    """Query, second query and cache."""
    keys = jax.random.split(jax.random.key(head_dim + group), 3)
    shapes = (rows, group * kv_heads, head_dim), (rows, group * kv_heads, head_dim), (rows, slots, 2 * head_dim)
    return tuple(jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))


def poisoned(kv, starts, lengths):
    """NaN in every slot that no head holds."""
    slots = np.arange(kv.shape[1])
    held = ((slots >= starts[..., None]) & (slots < (starts + lengths)[..., None])).any(1)
    return jnp.where(jnp.asarray(held)[..., None], kv, jnp.nan).astype(kv.dtype)


def assert_equal_to_reference(head_dim, group, dtype, lengths, *, segments=None, starts=None, sinks=0, scores=True):
    lengths = np.asarray(lengths, np.int32)
    slots = STARTED_SLOTS if segments is None else sum(segments)
    query, sink_query, kv = arrays(head_dim, group, slots, dtype, *lengths.shape)
    first = np.tile(np.cumsum([0, *(segments or ())[:-1]]), (len(lengths), 1)) if starts is None else np.asarray(starts)

    def attend(implementation, query, kv, sink_query):
        return ragged_decode_attention(
            query,
            kv,
            jnp.asarray(lengths),
            segments=segments,
            starts=None if starts is None else jnp.asarray(starts, jnp.int32),
            sink_query=sink_query if sinks else None,
            sinks=sinks,
            token_attention=scores,
            implementation=implementation,
        )

    # The interpreter compiles slowly, and what it compiles is used once.
    interpreted = jax.jit(functools.partial(attend, "tpu-interpret"), compiler_options=UNOPTIMISED)
    result = interpreted(query, poisoned(kv, first, lengths), sink_query)
    wanted = attend("reference", *(x.astype(jnp.float32) for x in (query, kv, sink_query)))
    for name, actual, expected in zip(result._fields, result, wanted, strict=True):
        if expected is None:
            assert actual is None
            continue
        largest = np.abs(np.asarray(actual) - np.asarray(expected)).max()
        relative = largest / max(1, np.abs(np.where(expected > -1e29, expected, 0)).max())
        assert relative <= LIMITS[dtype], f"{name}: the largest difference is {largest:.1e}"


CASES = [
    (64, 3, "float32", LENGTHS, {"segments": EQUAL}),
    (256, 1, "float32", LENGTHS, {"segments": EQUAL, "scores": False}),
    (128, 8, "float32", UNEQUAL_LENGTHS, {"segments": UNEQUAL, "sinks": 4}),
    (80, 7, "float32", UNEQUAL_LENGTHS, {"segments": UNEQUAL, "sinks": 4}),
    (64, 8, "bfloat16", UNEQUAL_LENGTHS, {"segments": UNEQUAL, "sinks": 4}),
    (128, 4, "bfloat16", STARTED_LENGTHS, {"starts": STARTS}),
    (96, 1, "bfloat16", STARTED_LENGTHS, {"starts": STARTS}),
]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("head_dim", "group", "dtype", "lengths", "settings"), CASES)
def test_every_head_and_row_has_a_length_of_its_own(head_dim, group, dtype, lengths, settings):
    assert_equal_to_reference(head_dim, group, dtype, lengths, **settings)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("cores", "heads_to_share"), [(1, 32), (3, 6)])
def test_cores_take_whole_heads_or_a_part_of_each(monkeypatch, cores, heads_to_share):
    # The cases above run on two cores, which is assumed where there is no TPU, with parts of each head.
    monkeypatch.setattr(tpu_plan, "_device_cores", lambda: cores)
    monkeypatch.setattr(tpu_plan, "_HEADS_TO_SHARE", heads_to_share)
    assert_equal_to_reference(64, 3, "float32", LENGTHS, segments=EQUAL)


def test_blocks_are_large_where_caches_are():
    # The interpreter raises where a load leaves the cache: no slot follows the last head's 8, and a block has 1,024.
    segments = (2592, 8)
    assert tpu_plan.make_plan(arrays(64, 1, 2600, "float32", 1, 2)[2], 2, segments=segments).block == 1024
    assert_equal_to_reference(64, 1, "float32", [[1025, 5]], segments=segments, sinks=4)


def plan(slots, kv_heads=3, head_dim=64, rows=2, cores=2, segments=None):
    kv = jax.ShapeDtypeStruct((rows, slots, 2 * head_dim), jnp.bfloat16)
    return tpu_plan.make_plan(kv, kv_heads, segments=segments, cores=cores)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("small_blocks", "no_shape_checks")
@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize(
    ("starts", "lengths", "slots"),
    [
        ([[0, 384, 768]] * 2, LENGTHS, 1152),
        ([[0, 37, 38]] * 2, UNEQUAL_LENGTHS, 1138),
        (STARTS, STARTED_LENGTHS, STARTED_SLOTS),
    ],
)
def test_loads_follow_lengths(starts, lengths, slots, cores):
    starts, lengths = np.asarray(starts, np.int32), np.asarray(lengths, np.int32)
    settings = plan(slots, cores=cores)
    spans = [tpu_plan.span(jnp.asarray(starts), jnp.asarray(lengths), part, settings) for part in range(settings.parts)]
    blocks = np.sum([np.asarray(span.last - span.first) for span in spans], axis=0)
    assert np.all(blocks <= -(-lengths // BLOCK) + (starts % 8 != 0))
    # The tiles of eight slots that the head touches, and nothing else.
    tiles = np.where(lengths > 0, -(-(starts + lengths) // 8) * 8 - starts // 8 * 8, 0)
    assert traffic.loaded_rows("tpu", lengths, starts=starts, slots=slots, head_dim=64, dtype="bfloat16") == tiles.sum()
    copied = np.zeros_like(lengths)
    for span in spans:
        for index in range(int(np.max(span.last))):
            inside = (index >= span.first) & (index < span.last)
            copied += np.where(inside, tpu_plan.loaded_slots(span, index, settings), 0)
    np.testing.assert_array_equal(copied, tiles)


@pytest.mark.usefixtures("no_shape_checks")
def test_parts_share_a_heads_own_blocks():
    settings = plan(131072, rows=1)
    lengths = jnp.asarray([100, 10_000, 131_072])
    spans = [tpu_plan.span(jnp.zeros(3, jnp.int32), lengths, part, settings) for part in range(2)]
    assert settings.block == 2048
    np.testing.assert_array_equal(np.stack([s.last - s.first for s in spans]), [[1, 3, 32], [0, 2, 32]])
    # Many heads are shared out whole instead.
    assert (plan(1024, rows=32).parts, plan(1024, rows=32).steps) == (1, 48)


def largest_array(result):
    """Elements of the largest array in an HLO type."""
    return max((math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w\[([\d,]+)\]", result)), default=0)


SMOLLM2, LLAMA_1B, LLAMA_8B, LLAMA_70B = (9, 3, 64), (32, 8, 64), (32, 8, 128), (64, 8, 128)
DUO = (320, 320, 8256, 320, 8256, 320, 8256, 8256)


@pytest.mark.parametrize(
    ("chip", "model", "rows", "segments", "settings"),
    [
        ("v5e", SMOLLM2, 1, (8192,) * 3, {}),
        ("v6e", LLAMA_1B, 32, (131072,) * 8, {}),
        ("v5e", LLAMA_8B, 32, (8192,) * 8, {"sinks": 4}),
        ("v5p", LLAMA_70B, 1, (131072,) * 8, {}),
        ("v5p", LLAMA_70B, 32, DUO, {"sinks": 4, "scores": True}),
        ("v5e", LLAMA_1B, 32, (1000 + 64, 37, 8192, 8192, 8192, 8192, 1, 2), {}),
        ("v6e", LLAMA_8B, 32, 8 * 8192, {}),
        ("v5e", (24, 8, 80), 32, (1000 + 64,) * 8, {"sinks": 4}),
        ("v5e", (24, 8, 96), 32, 8 * 8192, {}),
        ("v6e", (8, 8, 256), 32, (8192,) * 8, {"dtype": "float32"}),
    ],
)
def test_compiles_without_a_copy_of_the_cache(compile_for, chip, model, rows, segments, settings):
    (query_heads, kv_heads, head_dim), shared = model, isinstance(segments, int)
    slots = segments if shared else sum(segments)
    dtype, sinks = settings.get("dtype", "bfloat16"), settings.get("sinks", 0)

    def attend(query, kv, lengths, starts):
        return tpu.attend_parts(
            query,
            kv,
            lengths,
            segments=None if shared else segments,
            starts=starts if shared else jnp.broadcast_to(jnp.asarray(head_starts(segments))[None], lengths.shape),
            scale=head_dim**-0.5,
            sink_query=query if sinks else None,
            sinks=sinks,
            scores=settings.get("scores", False),
            interpret=False,
            cores=2 if chip == "v5p" else 1,
        )

    shapes = [(rows, query_heads, head_dim), (rows, slots, 2 * head_dim), (rows, kv_heads), (rows, kv_heads)]
    dtypes = [dtype, dtype, "int32", "int32"]
    compiled = compile_for(chip, attend, *map(jax.ShapeDtypeStruct, shapes, dtypes))
    size = math.prod(shapes[1])
    made = re.findall(r"= (\S+|\(.*?\)) ([\w-]+)\(", compiled.as_text())
    assert "custom-call" in {operation for _, operation in made}
    large = [operation for result, operation in made if largest_array(result) >= size]
    assert set(large) <= {"parameter", "bitcast"}
    bound = 0.02 + 0.25 * settings.get("scores", False)
    assert compiled.memory_analysis().temp_size_in_bytes < bound * size * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(
    ("head_dim", "dtype", "sinks", "message"),
    [
        (64, "float16", 0, r"`query` must be float32 or bfloat16, got float16"),
        (24, "float32", 0, r"the head size must be a multiple of 16, got 24"),
        (64, "float32", 129, r"at most 128 slots can have a second query, got 129"),
    ],
)
@pytest.mark.parametrize("implementation", ["tpu", "tpu-interpret"])
def test_says_what_it_cannot_do(head_dim, dtype, sinks, message, implementation):
    query, sink_query, kv = arrays(head_dim, 1, 384, dtype)
    with pytest.raises(NotImplementedError, match=message):
        ragged_decode_attention(
            query,
            kv,
            jnp.zeros((2, 3), jnp.int32),
            segments=(128,) * 3,
            sink_query=sink_query if sinks else None,
            sinks=sinks,
            implementation=implementation,
        )
