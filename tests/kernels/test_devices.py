"""What runs on devices that are not here: each backend's own limits, and plain JAX wherever a kernel cannot."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from kvjax_kernels import (
    column_sums,
    compact,
    compact_in_place,
    extend_attention,
    pooled_attention,
    prefill_attention,
    ragged_decode_attention,
    select_highest,
)
from kvjax_kernels.devices import compute_capability, missing_nvidia_gpu, platform
from kvjax_kernels.dispatch import record

# The operations that Mosaic's GPU kernels serve, and those whose products are Hopper's alone.
MOSAIC = {"ragged_decode_attention", "select_highest", "compact", "compact_in_place"}
HOPPER = {"pooled_attention", "column_sums"}
# Turing has no cuDNN attention, Ampere and Ada have, and Mosaic is for Hopper and newer.
CUDNN = {"prefill_attention"}
RUNS = {
    "7.5": set(),
    "8.0": CUDNN,
    "8.9": CUDNN,
    "9.0": CUDNN | MOSAIC | HOPPER,
    "10.0": CUDNN | MOSAIC,
    "12.0": CUDNN | MOSAIC,
    "gfx942": set(),
    "gfx90a:sramecc+": set(),
    "": set(),
    "9": set(),
    "0": set(),
    None: set(),
}


@pytest.fixture
def gpu(monkeypatch):
    """Has JAX find a GPU of a given compute capability; None has no such attribute."""

    def fake(capability: str | None) -> None:
        said = {} if capability is None else {"compute_capability": capability}
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda backend=None: [types.SimpleNamespace(platform="gpu", **said)])
        # What JAX itself asks of the machine, with the answers that this GPU would give.
        numbers = tuple(map(int, capability.split("."))) if capability and "." in capability else (0, 0)
        at_least = {"check_compute_capability": lambda least: numbers >= tuple(map(int, least.split(".")))}
        answers = {"check_cudnn_version": lambda: 92_000, "is_cuda_compute_capability_equal": lambda _: False}
        for question, answer in (at_least | answers).items():
            monkeypatch.setattr(fused_attention_stablehlo, question, answer)

    return fake


def given(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return given(*shape, dtype="int32")


def decode(query, kv, lengths, **settings):
    return ragged_decode_attention(query, kv, lengths, segments=(32, 32), **settings)


def select(scores, counts, **settings):
    return select_highest(scores, counts, most=4, **settings)


POSITIONS = integers(1, 8), integers(1, 2, 32)
QUERY, KV = given(1, 8, 4, 64), given(1, 2, 32, 128)
PROMPT = QUERY, given(1, 8, 2, 64), given(1, 8, 2, 64)
CALLS = {
    "prefill_attention": (prefill_attention, *PROMPT),
    "extend_attention": (extend_attention, QUERY, given(1, 2, 32, 64), given(1, 2, 32, 64), *POSITIONS),
    "ragged_decode_attention": (decode, given(1, 4, 64), given(1, 64, 128), integers(1, 2)),
    "pooled_attention": (pooled_attention, QUERY, KV, *POSITIONS),
    "select_highest": (select, given(1, 2, 32, dtype="float32"), integers(1, 2)),
    "column_sums": (column_sums, QUERY, KV, given(1, 4, 8, dtype="float32"), *POSITIONS),
    "compact": (compact, given(1, 32, 128), integers(1, 8)),
    "compact_in_place": (compact_in_place, given(4, 8, 128), integers(2, 2), integers(2, 8)),
}


def implementation_of(call, **settings) -> str:
    """What is chosen for a call, which is traced."""
    function, *shapes = call
    with record() as ran:
        jax.eval_shape(lambda *arrays: function(*arrays, **settings), *shapes)
    ((_, implementation),) = ran
    return implementation


@pytest.mark.parametrize("capability", RUNS)
def test_each_gpu_runs_the_kernels_that_are_for_it_and_plain_jax_for_the_rest(gpu, capability):
    gpu(capability)
    ran = {operation: implementation_of(call) for operation, call in CALLS.items()}
    assert ran == {operation: "gpu" if operation in RUNS[capability] else "xla" for operation in CALLS}


@pytest.mark.parametrize("capability", ["7.5", "8.9", "gfx942", "12.0", None])
def test_a_forced_kernel_says_which_gpu_it_needs(gpu, capability):
    gpu(capability)
    for operation in CALLS.keys() - RUNS[capability] - {"extend_attention"}:
        this = "none" if capability is None else capability
        with pytest.raises(NotImplementedError, match=rf"`{operation}` cannot do this: .*GPU.*, this one has {this}"):
            implementation_of(CALLS[operation], implementation="gpu")


# JAX's own check: head sizes that 8 divides, up to 128 before Hopper and 256 since; 16 bits.
@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype", "reason"),
    [
        ("8.0", 128, "bfloat16", None),
        ("8.9", 72, "float16", None),
        ("8.0", 136, "bfloat16", "up to 128, not 136"),
        ("8.6", 20, "bfloat16", "head sizes that 8 divides, up to 128, not 20"),
        ("9.0", 256, "bfloat16", None),
        ("9.0", 264, "bfloat16", "up to 256, not 264"),
        ("12.0", 100, "float16", "head sizes that 8 divides, up to 256, not 100"),
        ("8.0", 64, "float32", "bfloat16 or float16, not float32"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"window": 3, "log_sum_exp": True}], ids=["plain", "window"])
def test_cudnns_limits_leave_the_prompt_to_plain_jax(gpu, capability, head_dim, dtype, reason, settings):
    gpu(capability)
    call = (prefill_attention, *(given(1, 8, heads, head_dim, dtype=dtype) for heads in (4, 2, 2)))
    assert implementation_of(call, **settings) == ("xla" if reason else "gpu")
    if reason:
        with pytest.raises(NotImplementedError, match=rf"`prefill_attention` cannot do this: cuDNN's .*{reason}"):
            implementation_of(call, implementation="gpu", **settings)


def test_cudnn_gives_log_sum_exps_in_float32(gpu):
    gpu("8.0")
    _, log_sum_exp = jax.eval_shape(lambda *arrays: prefill_attention(*arrays, log_sum_exp=True), *PROMPT)
    assert log_sum_exp is not None
    assert log_sum_exp.dtype == jnp.float32


def test_arrays_are_computed_on_where_they_lie(gpu):
    gpu("9.0")
    assert (platform(), platform(given(1)), platform(np.zeros(1))) == ("gpu", "gpu", "gpu")
    assert platform(jnp.zeros(1)) == "cpu"
    assert (compute_capability(), compute_capability(jnp.zeros(1))) == ((9, 0), None)
    assert jax.jit(lambda x: platform(x) == "gpu")(jnp.zeros(1))
    # Nothing here keeps a program for another machine from being compiled.
    assert missing_nvidia_gpu(jnp.zeros(1), least=(9, 0)) is None
    for place in ("cpu", jax.devices("cpu")[0]):
        with jax.default_device(place):
            assert platform(given(1)) == "cpu"
