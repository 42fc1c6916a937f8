"""`kvjax evaluate`."""

import json
import pathlib

import pytest

import kvjax_models
from kvjax.cli import evaluate

SMALL = ("--lengths", "260", "--depths", "0", "1", "--tasks", "needle", "perplexity", "--budgets", "96")


@pytest.fixture
def known(small, monkeypatch) -> None:
    """The small model's configuration is read too, before it is loaded."""
    monkeypatch.setattr(evaluate, "read_config", lambda source: small.config)


@pytest.mark.smollm2
@pytest.mark.usefixtures("known")
def test_a_run_writes_results_a_manifest_a_table_and_plots(run, tmp_path):
    out = tmp_path / "run"
    argv = ("evaluate", "small", "--out", str(out), *SMALL, "--policies", "snapkv:window=16", "streaming-llm")
    result = run(*argv)
    assert result.code == 0, result.err
    assert "| snapkv:window=16 | 96 | 96 |" in result.out
    assert result.out == (out / "table.md").read_text()
    assert "18 of 18 answers" in result.err
    assert len((out / "results.jsonl").read_text().splitlines()) == 3 * (2 * 2 + 2)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["command"][0] == "kvjax"
    pictures = sorted(file.stem for file in out.glob("*.png"))
    assert pictures == [
        *("heatmap_needle_agnostic", "heatmap_needle_aware"),
        *("memory_against_score", "score_against_budget"),
    ]
    for file in out.glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG")
    again = run(*argv, "--no-plots")
    assert again.code == 0
    assert again.out == result.out
    assert "answers" not in again.err
    other = run(*argv, "--seed", "1")
    assert other.code == 2
    assert "`--out` holds a run with another `--seed`" in other.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policies", "snap"], "--policies must be among full, streaming-llm"),
        (["--policies", "snapkv:width=3"], "--policy snapkv has no setting 'width'"),
        (["--tasks", "needles"], "`--tasks` must be among needle, multi-key"),
        (["--budgets", "1500"], "`--budgets` must not be above the shortest of `--lengths`, 1000, got 1500"),
        (["--budgets", "16"], "`--budgets` must be at least `sinks` + `window` = 36 tokens, got 16"),
        (["--lengths", "9000"], "`--lengths` must not be over the 8192 tokens that the model can read, got 9000"),
        (["--depths", "1.5"], "`--depths` must be from 0 to 1, got 1.5"),
        (["--text", "EMPTY"], "--text must be a text of words, and EMPTY has none"),
        (["--text", "nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["--budgets", "0.01"], "`--budgets` = 0.01 of the 1000 tokens of row 0 is 10 tokens, under"),
        (["--out", "EMPTY/new"], "`--out` must be a folder that can be written, and "),
        (["--out", "x" * 300], "`--out` must be a folder that can be written, and "),
        (["--samples", "0"], "`--samples` must be at least 1 example, got 0"),
        (["--modes", "both"], "`--modes` must be among aware, agnostic, got 'both'"),
        (["--out", "."], "`--out` must be a run's folder or an empty one, got ., which holds other things"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_says_what_is_wrong_before_a_model_is_loaded(run, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("EMPTY").write_text(" \n")
    monkeypatch.setattr(kvjax_models, "load", lambda *args: pytest.fail("a model has been loaded"))
    result = run("evaluate", "--out", "new", *argv)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert not pathlib.Path("new").exists()
