"""A small model, tokenizer and run, shared with a script that a test kills."""

import pathlib
import runpy
import types

import pytest

import kvjax_models

SCRIPT = pathlib.Path(__file__).parent / "small_run.py"


@pytest.fixture(scope="session")
def small_run() -> types.SimpleNamespace:
    """What the script defines, and its file."""
    return types.SimpleNamespace(**runpy.run_path(str(SCRIPT)), file=SCRIPT)


@pytest.fixture(scope="session")
def small(small_run) -> kvjax_models.Llama:
    """Two random layers, four query and two KV heads of 8."""
    return small_run.make_model()
