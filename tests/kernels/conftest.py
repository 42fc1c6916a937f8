"""Compilers for chips that are not there."""

import os

# No TPU is asked what it is, and several test workers may load the compiler at once.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

_TPU = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 } device_description_str: "NVIDIA H100 80GB HBM3"
"""

#: `compile_for(chip, f, *arrays, **options of jax.jit)`: the program for a chip, from arrays or their shapes.
Compile = Callable[..., jax.stages.Compiled]


@functools.cache
def _device(chip: str) -> SingleDeviceSharding:
    if chip == "h100":
        target = topologies.get_topology_desc("h100", platform="cuda", topology="1x1x1", target_config=_H100)
    else:
        target = topologies.get_topology_desc(_TPU[chip], platform="tpu")
    return SingleDeviceSharding(target.devices[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that need these compilers."""
    for item in items:
        if {"compile_for", "blackwell"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("aot")


@pytest.fixture(scope="session")
def compile_for() -> Compile:
    """Compiles for a chip that is not there: "v5e", "v6e", "v5p" or "h100"."""
    for package in ("libtpu", "jax_cuda13_plugin"):
        if importlib.util.find_spec(package) is None:
            pytest.fail("the compilers of the `aot` group are not there: uv run --group aot pytest -m aot")

    def compile(chip: str, function: Callable, *arrays: Any, **options: Any) -> jax.stages.Compiled:
        place = _device(chip)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arrays)
        return jax.jit(function, **options).lower(*shapes).compile()

    return compile


@pytest.fixture(scope="session")
def blackwell() -> str:
    """The target of compilers for a Blackwell GPU; only for a process that compiles for no other GPU."""
    text = _H100.replace("major: 9 }", "major: 10 }").replace("core_count: 132", "core_count: 148")
    return text.replace("H100 80GB HBM3", "B200")
