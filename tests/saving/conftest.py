"""A small cache, saved once."""

import pathlib

import numpy as np
import pytest

import kvjax

PROMPT = np.random.default_rng(0).integers(0, 512, 60)


@pytest.fixture(scope="session")
def h2o_cache(tiny) -> kvjax.Cache:
    """What H2O keeps of 60 tokens."""
    return kvjax.prefill(tiny, PROMPT, policy=kvjax.H2O(budget=16), max_new_tokens=4)[1]


@pytest.fixture(scope="session")
def saved_once(tiny, h2o_cache, tmp_path_factory) -> pathlib.Path:
    """Its folder, to be copied and not changed."""
    folder = tmp_path_factory.mktemp("saved") / "cache"
    kvjax.save_cache(folder, h2o_cache, tiny)
    return folder
