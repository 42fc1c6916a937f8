"""Fixtures of the command's tests: the command in this process, with a model that is loaded once."""

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

import kvjax_models
from kvjax.cli import loading
from kvjax.cli.main import main


class Run(NamedTuple):
    """What a run of the command gave."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Runs the command in this process, without touching the user's compilation cache."""
    monkeypatch.setattr(loading, "use_compilation_cache", lambda: None)

    def call(*argv: str, stdin: bytes = b"") -> Run:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = main(argv)
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return call


@pytest.fixture
def generate(
    run: Callable[..., Run], smollm2: kvjax_models.Loaded, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Run]:
    """Runs `kvjax generate` with the embedded model, loaded already."""
    file = str(kvjax_models.embedded_model())

    def load(source: str, dtype: str | None = None) -> kvjax_models.Loaded:
        assert (source, dtype) == (file, None)
        return smollm2

    monkeypatch.setattr(kvjax_models, "load", load)
    return lambda *argv, **stdin: run("generate", *argv, **stdin)
