"""Fixtures of the command's tests: the command in this process, with a model that is loaded once."""

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
from flax import nnx

import kvjax_models
from kvjax.cli import loading
from kvjax.cli.main import main
from kvjax.rope import Rope


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


@pytest.fixture
def small(smollm2, monkeypatch) -> kvjax_models.Loaded:
    """A random model of two layers that is loaded instead of any, with a real tokenizer."""
    config = kvjax_models.LlamaConfig(
        vocab_size=49152,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=Rope(head_dim=8),
        tie_word_embeddings=True,
    )
    loaded = kvjax_models.Loaded(kvjax_models.Llama(config, rngs=nnx.Rngs(0)), smollm2.tokenizer, config)
    monkeypatch.setattr(kvjax_models, "load", lambda source, dtype=None: loaded)
    return loaded
