"""Strict settings for every test, and the models that several of them share."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import beartype
import jaxtyping

# An int where a float is asked for is fine (PEP 484); the hook takes its checker by name only.
beartype.beartype = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
# Every annotated shape is checked in every call that is traced.
jaxtyping.install_import_hook(["kvjax", "kvjax_kernels", "kvjax_models"], "beartype.beartype")

import pathlib
from collections.abc import Iterator

import jax
import pytest

import kvjax_models

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def parity() -> pathlib.Path:
    """The folder of reference results."""
    return pathlib.Path(__file__).parent / "parity"


@pytest.fixture(scope="session")
def smollm2() -> kvjax_models.Loaded:
    """SmolLM2-135M-Instruct in float32."""
    return kvjax_models.load(kvjax_models.embedded_model())


@pytest.fixture(scope="session")
def tiny(parity: pathlib.Path) -> kvjax_models.Llama:
    """A random Llama of four layers, eight query and two KV heads of 16, with peaky attention."""
    return kvjax_models.load(parity / "tiny_seed0").params


@pytest.fixture
def no_shape_checks() -> Iterator[None]:
    """Switches off the check of annotations, which would come before the messages that users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _compile_quickly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves LLVM's optimisations out but where the real model runs, or what is compiled for a chip is looked at.

    XLA's own passes, which decide about copies and memory, are the same. Most of the suite's time is compilation.
    """
    full = {"smollm2", "aot"} & {mark.name for mark in request.node.iter_markers()}
    jax.config.update("jax_disable_most_optimizations", not full)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def _few_memory_maps() -> Iterator[None]:
    """Drops compiled programs before the kernel's limit of mappings is reached, past which LLVM crashes."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
