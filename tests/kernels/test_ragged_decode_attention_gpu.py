"""The Mosaic GPU kernel of `ragged_decode_attention`: in its interpreter, and compiled for GPUs that are not there."""

import functools
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from kvjax_kernels import mosaic_gpu, ragged_decode_attention
from kvjax_kernels.ragged_decode_attention import gpu
from kvjax_kernels.split_rows import head_starts

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
# The interpreter's programs run once: compiling them is most of the time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def attend(query, kv, lengths, *, own_key=None, own_value=None, token_attention=True, **settings):
    """`ragged_decode_attention` by the interpreted kernel, float32 rows too."""
    settings = {"segments": None, "sink_query": None, "sinks": 0, "scale": 0.2, **settings}
    if "starts" not in settings:
        settings["starts"] = jnp.broadcast_to(jnp.asarray(head_starts(settings["segments"]))[None], lengths.shape)
    settings |= {"own_key": own_key, "own_value": own_value, "token_attention": token_attention}
    return gpu.run(query, kv, lengths, **settings, interpret=True)


def arrays(head_dim, group, lengths, segments=None, starts=None, *, sinks=0, own=False, dtype="float32"):
    """Arguments, with NaN in every slot that no head holds, and what softmax in float64 makes of them."""
    (batch, heads), slots = np.shape(lengths), sum(segments or (640,))
    shapes = {"query": (batch, group * heads, head_dim), "kv": (batch, slots, 2 * head_dim)}
    shapes |= {"sink_query": shapes["query"]} if sinks else {}
    shapes |= {"own_key": (batch, heads, head_dim), "own_value": (batch, heads, head_dim)} if own else {}
    draw = np.random.default_rng(head_dim + group).standard_normal
    given = {name: jnp.asarray(draw(shape), dtype) for name, shape in shapes.items()}
    first = np.tile(np.cumsum([0, *(segments or ())][:heads]), (batch, 1)) if starts is None else np.asarray(starts)
    wanted = softmax(first, np.asarray(lengths), sinks, **{k: np.asarray(x, np.float64) for k, x in given.items()})
    place = np.arange(slots) - first[..., None]
    held = ((place >= 0) & (place < np.asarray(lengths)[..., None])).any(1)
    given["kv"] = jnp.where(held[..., None], given["kv"], jnp.asarray(jnp.nan, dtype))
    given |= {"lengths": jnp.asarray(lengths, jnp.int32)}
    given |= {} if starts is None else {"starts": jnp.asarray(starts, jnp.int32)}
    return given, {"segments": segments, "sinks": sinks}, wanted


def softmax(starts, lengths, sinks, query, kv, sink_query=None, own_key=None, own_value=None):
    """The operation, a row and a KV head at a time."""
    batch, heads = lengths.shape
    query = query.reshape(batch, heads, -1, query.shape[-1])
    asks = query if sink_query is None else sink_query.reshape(query.shape)
    output, log_sum_exp = np.zeros(query.shape), np.full(query.shape[:3], -1e30)
    attention, own_attention = np.zeros(kv.shape[:2]), np.zeros(lengths.shape)
    for at in np.ndindex(batch, heads):
        rows = kv[at[0], starts[at] : starts[at] + lengths[at]]
        if own_key is not None and own_value is not None:
            rows = np.concatenate([rows, [np.concatenate([own_key[at], own_value[at]])]])
        if not len(rows):
            continue
        key, value = np.split(rows, 2, axis=1)
        place = np.arange(len(rows))
        scores = 0.2 * np.where((place < sinks) & (place < lengths[at]), asks[at] @ key.T, query[at] @ key.T)
        log_sum_exp[at] = np.log(np.exp(scores).sum(1))
        weights = np.exp(scores - log_sum_exp[at][:, None])
        output[at] = weights @ value
        attention[at[0], starts[at] : starts[at] + lengths[at]] += weights.sum(0)[: lengths[at]]
        own_attention[at] = weights.sum(0)[lengths[at] :].sum()
    names = ("output", "log_sum_exp", "token_attention", "own_attention")
    flat = (output.reshape(batch, -1, query.shape[-1]), log_sum_exp.reshape(batch, -1), attention, own_attention)
    return dict(zip(names, flat, strict=True))


def parts(heads: int, longest: int, head_dim: int) -> int:
    """Parts of each head's tokens."""
    blocks = -(-longest // gpu.block_rows(head_dim))
    return mosaic_gpu.count_parts(heads, blocks, thread_blocks=gpu._THREAD_BLOCKS)


def interpreted(function, settings):
    return jax.jit(functools.partial(function, **settings), compiler_options=QUICKLY)


def assert_equal_to(result, wanted, dtype):
    for name, value in wanted.items():
        actual = getattr(result, name)
        if actual is not None:
            largest = (np.abs(actual - value) / np.maximum(1, np.abs(value))).max()
            assert largest <= LIMITS[dtype], f"{name}: the largest difference is {largest:.1e}"


@pytest.mark.parametrize(
    ("head_dim", "group", "segments", "lengths", "more"),
    [
        # Blocks have 128 rows at 64 and less, 64 at 96 and 128, 32 at 256.
        (64, 3, (256, 256, 256), [[0, 1, 127], [128, 129, 256]], {"sinks": 4, "own": True}),
        (96, 1, (37, 301), [[37, 63], [0, 301]], {}),
        (128, 8, (64, 700), [[64, 0], [1, 321]], {"own": True}),
        (256, 7, (65,), [[33], [65]], {"sinks": 4}),
        (32, 17, (40,), [[40]], {}),
    ],
)
def test_equal_to_the_reference(head_dim, group, segments, lengths, more):
    given, settings, wanted = arrays(head_dim, group, lengths, segments, **more)
    assert_equal_to(interpreted(attend, settings)(**given), wanted, "float32")


def test_every_row_may_have_starts_of_its_own():
    lengths, starts = [[100, 70, 0], [129, 1, 64]], [[540, 3, 77], [1, 333, 501]]
    given, settings, wanted = arrays(128, 4, lengths, starts=starts)
    result = interpreted(attend, settings | {"token_attention": False})(**given)
    assert result.token_attention is None
    assert_equal_to(result, wanted, "float32")
    assert parts(6, 640, 128) > 1


@pytest.mark.parametrize(
    ("head_dim", "group", "where", "lengths", "more"),
    [
        (64, 4, {"segments": (129, 200)}, [[129, 0], [1, 200]], {"sinks": 4, "own": True}),
        (128, 3, {"starts": [[0, 71], [9, 300]]}, [[71, 300], [63, 65]], {"own": True}),
    ],
)
def test_bfloat16_through_the_operation(head_dim, group, where, lengths, more):
    given, settings, wanted = arrays(head_dim, group, lengths, **where, **more, dtype="bfloat16")
    settings |= {"scale": 0.2, "token_attention": True, "implementation": "gpu-interpret"}
    assert_equal_to(interpreted(ragged_decode_attention, settings)(**given), wanted, "bfloat16")


def test_loads_whole_blocks_up_to_each_length(monkeypatch):
    copies = []
    real = gpu_callbacks.copy_gmem_to_smem
    monkeypatch.setattr(
        gpu_callbacks, "copy_gmem_to_smem", lambda *args, **kw: (copies.append(0), real(*args, **kw))[1]
    )
    lengths = np.asarray([[0, 1], [64, 321]], np.int32)
    given, settings, _ = arrays(128, 1, lengths, (64, 700))
    jax.block_until_ready(interpreted(attend, settings | {"token_attention": False})(**given))
    rows = np.asarray([[0, 64], [64, 384]])
    # In float32 a row of the queries is four tiles wide, of the cache eight.
    programs = lengths.size * parts(lengths.size, 700, 128)
    assert len(copies) == 4 * programs + 8 * rows.sum() // gpu.block_rows(128)


@pytest.mark.parametrize("number", [1, 3, 8])
def test_parts_share_out_each_heads_own_blocks(number):
    for length in (0, 1, 64, 65, 449, 8192):
        shares = [mosaic_gpu.share(length, part, parts=number, block=64) for part in range(number)]
        taken = [block for first, count in shares for block in range(first, first + count)]
        assert taken == list(range(-(-length // 64)))
        counts = [count for _, count in shares]
        assert max(counts) - min(counts) <= 1


def test_parts_fill_the_chip_and_no_more():
    assert parts(8, 131072, 128) == 99
    assert parts(256, 8192, 128) == 4
    assert parts(1024, 8192, 128) == 1
    assert parts(8, 300, 128) == 1


DUO = (320, 8256, 320, 8256, 8256, 320, 8256, 8256)


@pytest.mark.parametrize(
    ("batch", "query_heads", "head_dim", "segments", "sinks", "scores"),
    [
        pytest.param(1, 9, 64, (8192,) * 3, 0, True, id="SmolLM2-135M"),
        pytest.param(32, 32, 64, (131072,) * 8, 0, False, id="Llama-3.2-1B"),
        pytest.param(1, 32, 128, DUO, 4, False, id="Llama-3.1-8B, DuoAttention"),
        pytest.param(1, 32, 128, 8 * 131072 + 37, 0, False, id="Llama-3.1-8B, AdaKV"),
        pytest.param(32, 64, 128, (8192,) * 8, 4, True, id="Llama-3-70B"),
        pytest.param(1, 64, 256, (1000 + 64, 37), 4, True, id="wide heads, odd segments"),
    ],
)
def test_compiles_without_spills_and_copies_of_the_cache(
    compile_for, capfd, monkeypatch, batch, query_heads, head_dim, segments, sinks, scores
):
    program, shapes = operation(batch, query_heads, head_dim, segments, sinks, scores)
    report_kernels(monkeypatch)
    compiled = compile_for("h100", program, shapes)
    report = "".join(capfd.readouterr())
    assert "for 'sm_90a'" in report
    assert_fits(report)
    cache, longest = shapes["kv"].size * 2, segments if isinstance(segments, int) else max(segments)
    wanted = 4 * scores * batch * query_heads * (longest + 128)
    assert compiled.memory_analysis().temp_size_in_bytes < cache // 100 + wanted + 2**20
    kv = rf"bf16\[{batch},{shapes['kv'].shape[1]},"
    assert not re.findall(rf"= {kv}\S+ (?!parameter)\w+\(", compiled.as_text())


BLACKWELL = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from kvjax_kernels import ragged_decode_attention

target = topologies.get_topology_desc("b200", platform="cuda", topology="1x1x1", target_config=sys.argv[1])
place = SingleDeviceSharding(target.devices[0])
def given(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
def attend(query, kv, lengths, sink_query):
    settings = {"segments": (1024,) * 8, "sinks": 4, "token_attention": True, "implementation": "gpu"}
    return ragged_decode_attention(query, kv, lengths, sink_query=sink_query, **settings)
query = given(2, 32, 128)
jax.jit(attend).lower(query, given(2, 8192, 256), given(2, 8, dtype=jnp.int32), query).compile()
"""


def test_compiles_for_blackwell(compile_for, blackwell, monkeypatch):
    del compile_for  # It skips where the compilers are missing.
    report_kernels(monkeypatch)
    command = [sys.executable, "-c", BLACKWELL, blackwell]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "for 'sm_100a'" in result.stdout
    assert_fits(result.stdout)


def operation(batch, query_heads, head_dim, segments, sinks, scores):
    """The operation, and the shapes of its arguments; segments are the number of slots where rows have starts."""
    heads = 8 if isinstance(segments, int) else len(segments)
    slots = segments if isinstance(segments, int) else sum(segments)
    query = jax.ShapeDtypeStruct((batch, query_heads, head_dim), jnp.bfloat16)
    whole = jax.ShapeDtypeStruct((batch, heads), jnp.int32)
    own = jax.ShapeDtypeStruct((batch, heads, head_dim), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((batch, slots, 2 * head_dim), jnp.bfloat16)
    shapes = {"query": query, "kv": kv, "lengths": whole, "own_key": own, "own_value": own}
    shapes |= {"sink_query": query} if sinks else {}
    shapes |= {"starts": whole} if isinstance(segments, int) else {}
    settings = {"segments": None if isinstance(segments, int) else segments, "sinks": sinks}
    settings |= {"token_attention": scores, "implementation": "gpu"}
    return lambda given: ragged_decode_attention(**given, **settings), shapes


def report_kernels(monkeypatch):
    """Has Mosaic and ptxas say what a kernel needs."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_RESOURCES", "1")


def assert_fits(report):
    """No register is spilled, and three blocks of threads fit into a multiprocessor, two where scores are wanted."""
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
    (registers,) = re.findall(r"Used (\d+) registers", report)
    (shared,) = re.findall(r"smem_scratch_bytes=(\d+)", report)
    assert int(registers) <= 65536 // 128 // 3
    assert int(shared) <= 110 * 1024


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype", "message"),
    [
        (64, 1, "float32", "the tensor cores take bfloat16 or float16, not float32"),
        (80, 1, "bfloat16", "the head size must be a multiple of 32 up to 256, not 80"),
        (512, 1, "bfloat16", "the head size must be a multiple of 32 up to 256, not 512"),
        (64, 33, "bfloat16", "at most 32 query heads may share a KV head, not 33"),
    ],
)
def test_says_what_it_cannot_do(head_dim, group, dtype, message):
    query, kv = jnp.zeros((1, group, head_dim), dtype), jnp.zeros((1, 8, 2 * head_dim), dtype)
    with pytest.raises(NotImplementedError, match=message):
        ragged_decode_attention(query, kv, jnp.zeros((1, 1), jnp.int32), segments=(8,), implementation="gpu")
