"""`kvjax duo identify` and `kvjax duo show`, and a pattern on the way into `kvjax generate`."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import kvjax
import kvjax_models
from kvjax.cli import duo_identify

RECIPE = ("--steps", "2", "--min-length", "220", "--max-length", "240", "--lengths", "1", "--recent", "16")
RECIPE += ("--passkeys", "2", "--passkey-size", "3")


@pytest.fixture(autouse=True)
def known(small, monkeypatch) -> None:
    """The small model's configuration is read too, before it is loaded."""
    monkeypatch.setattr(duo_identify, "read_config", lambda source: small.config)


@pytest.mark.smollm2
def test_identify_show_and_generate_work_one_after_the_other(run, small, tmp_path):
    folder = tmp_path / "pattern"
    result = run("duo", "identify", "small", "--out", str(folder), *RECIPE)
    assert (result.code, result.out) == (0, "")
    assert "step 2 of 2, 220 tokens: loss " in result.err
    assert f"wrote {folder}" in result.err
    assert json.loads((folder / "training.json").read_text())["recipe"]["steps"] == 2
    pattern = kvjax.HeadPattern.load(folder)
    assert len(pattern.scores) == len(pattern.scores[0]) == 2

    again = run("duo", "identify", "small", "--out", str(folder), *RECIPE)
    assert again.code == 0
    assert "step" not in again.err
    assert kvjax.HeadPattern.load(folder) == pattern

    shown = run("duo", "show", str(folder), "--out", str(tmp_path / "pattern.png"))
    assert shown.code == 0
    assert f"{pattern.scores[1][0]:.3f}  {pattern.scores[1][1]:.3f}" in shown.out
    assert "learned with 64 sinks and 16 recent tokens" in shown.out
    assert "sparsity 0.5: 2 heads stream" in shown.out
    assert "seed 0" in shown.out
    assert (tmp_path / "pattern.png").read_bytes().startswith(b"\x89PNG")

    answer = run(
        *("generate", "--raw", "Once upon a time", "--policy", "duo", "--pattern", str(folder)),
        *("--sparsity", "0.5", "--set", "recent=2", "--set", "sinks=1", "--max-new-tokens", "4", "--json"),
    )
    assert answer.code == 0, answer.err
    stats = json.loads(answer.out)
    assert stats["policy"]["sparsity"] == 0.5
    assert stats["policy"]["pattern"] == repr(pattern)


@pytest.mark.smollm2
def test_a_killed_job_goes_on_to_the_same_pattern(run, small, tmp_path):
    kvjax_models.save(tmp_path / "model", small)

    def arguments(folder):
        recipe = (*RECIPE[2:], "--steps", "12", "--checkpoint-every", "2")
        return ["duo", "identify", str(tmp_path / "model"), "--out", str(tmp_path / folder), *recipe]

    command = [sys.executable, "-c", "import sys; from kvjax.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen([*command, *arguments("killed")], stderr=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None and not (tmp_path / "killed" / "job" / "steps" / "2").exists():
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "config.json").exists()

    whole, resumed = run(*arguments("whole")), run(*arguments("killed"))
    assert (whole.code, resumed.code) == (0, 0)
    assert "step 1 of 12" in whole.err
    assert "step 1 of 12" not in resumed.err
    assert kvjax.HeadPattern.load(tmp_path / "killed") == kvjax.HeadPattern.load(tmp_path / "whole")


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "`--steps` must be at least 1 step, got 0"),
        (["--batch-size", "0"], "`--batch-size` must be at least 1 prompt, got 0"),
        (["--passkeys", "99"], "`--passkeys` must be from 1 to 20, got 99"),
        (["--checkpoint-every", "0"], "`--checkpoint-every` must be at least 1 step, got 0"),
        (["--max-length", "600"], "`--max-length` must not be over the 512 tokens that the model can read, got 600"),
        (["--haystack", "nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["--haystack", "EMPTY"], "--haystack must be a text of words, and EMPTY has none"),
        (["--passkeys", "three"], "argument --passkeys: invalid int value"),
        (["--out", "EMPTY/new"], "`--out` must be a folder that can be written, and "),
        (["--out", "other"], "`--out` belongs to a job with `--steps` 7, not 2"),
        (["--out", "damaged"], "damaged/job/job.json must hold a JSON object, got list"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_identify_says_what_is_wrong_before_a_model_is_loaded(run, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("EMPTY").write_text(" \n")
    for name, text in (("other", '{"recipe": {"steps": 7}}'), ("damaged", "[]")):
        pathlib.Path(name, "job").mkdir(parents=True)
        pathlib.Path(name, "job", "job.json").write_text(text)
    monkeypatch.setattr(kvjax_models, "load", lambda *args: pytest.fail("a model has been loaded"))
    result = run("duo", "identify", "small", "--out", "new", *RECIPE, *argv)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert not pathlib.Path("new").exists()


@pytest.mark.smollm2
def test_identify_says_what_only_the_tokenizer_can_tell(run, tmp_path):
    result = run("duo", "identify", "small", "--out", str(tmp_path / "new"), *RECIPE, "--min-length", "40")
    assert (result.code, result.out) == (2, "")
    assert "`--min-length` must leave room for 2 passkeys" in result.err


def test_show_says_what_is_wrong(run, tmp_path):
    result = run("duo", "show", str(tmp_path))
    assert result.code == 2
    assert "a head pattern is a folder with full_attention_heads.tsv" in result.err
    kvjax.HeadPattern.of([[0.5, 1.0]]).save(tmp_path)
    for text in ("[]", "{", "[" * 99999, '{"recipe": 3, "seconds": 1}', '{"recipe": {}, "seconds": 1e999}'):
        (tmp_path / "training.json").write_text(text)
        assert str(tmp_path / "training.json") in run("duo", "show", str(tmp_path)).err
    result = run("duo", "show", str(tmp_path), "--out", str(tmp_path / "nowhere" / "picture.png"))
    assert (result.code, result.out) == (2, "")
    assert "--out must lie in a folder that exists" in result.err
    result = run("duo", "show", str(tmp_path), "--out", "picture.txt")
    assert "--out must end in .png, .svg, .pdf, got 'picture.txt'" in result.err
    (tmp_path / "training.json").write_text("{}")
    assert "is not what `kvjax duo identify` writes" in run("duo", "show", str(tmp_path)).err


def test_a_pattern_of_the_authors_is_shown_too(run, tmp_path):
    # Their files are plain numbers between tabs, some slightly out of range, and sizes under their names.
    (tmp_path / "full_attention_heads.tsv").write_text("1.0001\t0.25\n0.0\t0.75\n")
    (tmp_path / "config.json").write_text('{"sink_size": 128, "recent_size": 256, "lr": 0.02}')
    shown = run("duo", "show", str(tmp_path))
    assert shown.code == 0
    assert "1.000  0.250" in shown.out
    assert "learned with 128 sinks and 256 recent tokens" in shown.out
