"""Strict settings for every test, and the models that several of them share."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import beartype
from jaxtyping import install_import_hook

# An int where a float is asked for is fine (PEP 484); the hook takes its checker by name only.
beartype.beartype = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
# Every annotated shape is checked in every call that is traced.
install_import_hook(["kvjax", "kvjax_kernels", "kvjax_models"], "beartype.beartype")

import pathlib

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
