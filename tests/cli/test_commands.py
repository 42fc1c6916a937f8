"""Version, help, `kvjax models`, the spinner, and the compilation cache."""

import io
import os
import pathlib
import subprocess
import sys
import time

import pytest

import kvjax
import kvjax_models
from kvjax.cli.compilation_cache import cache_folder
from kvjax.cli.policies import POLICIES
from kvjax.cli.progress import activity

COMMAND = [sys.executable, "-c", "import sys; from kvjax.cli.main import main; sys.exit(main())"]


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["models", "--help"], ["--version"]])
def test_help_and_version_go_to_stdout(argv, run, capsys):
    with pytest.raises(SystemExit) as left:
        run(*argv)
    assert left.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert ("kvjax generate" in out or "kvjax models" in out) if "--help" in argv else out.startswith("kvjax ")


def test_every_policy_of_the_table_is_one_of_kvjax():
    for name in POLICIES.values():
        assert issubclass(getattr(kvjax, name), kvjax.Policy)


def test_models_tells_what_the_embedded_model_is(run):
    result = run("models")
    assert (result.code, result.err) == (0, "")
    for text in (
        "30 layers, hidden size 576",
        "9 query heads, 3 KV heads, head size 64",
        "134,515,008",
        "Q4_1 (210 tensors)",
        "8,192 tokens",
        "theta 100000, not scaled",
        "49,152 tokens",
        "chat template yes",
        "<|im_end|> (2)",
        "46,080 bytes a token in float32, 23,040 in bfloat16",
    ):
        assert text in result.out


def test_models_does_not_load_weights(run, parity, monkeypatch):
    monkeypatch.setattr(kvjax_models, "load", None)
    result = run("models", str(parity / "tiny_seed0"))
    assert "492,672" in result.out
    assert "F32 (39 tensors)" in result.out
    assert "chat template no" in result.out


def test_models_tells_what_an_orbax_checkpoint_is(run, parity, tmp_path):
    kvjax_models.save(tmp_path / "saved", kvjax_models.load(parity / "tiny_seed0", "bfloat16"))
    result = run("models", str(tmp_path / "saved"))
    assert "Orbax" in result.out
    assert "bfloat16 (39 tensors)" in result.out


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_spinner_shows_on_terminals_only(stream, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    with activity("Loading [a] model") as shown_now:
        time.sleep(0.01)
        shown_now.end()
        shown_now.end()
    assert ("Loading [a] model" in shown.getvalue()) == (stream is Terminal)


def test_the_cache_lies_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvjax"


def test_importing_kvjax_switches_no_cache_on():
    program = "import jax, kvjax, kvjax.cli.main; print(jax.config.jax_compilation_cache_dir)"
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    done = _python(program, environment)
    assert done.stdout == "None\n"


@pytest.mark.smollm2
def test_a_second_run_gives_its_first_token_within_ten_seconds(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    seconds = [_first_token_seconds(environment)]
    programs = sorted((tmp_path / "kvjax" / "xla").iterdir())
    assert programs
    # Four times at most, because other work on the machine counts too. A slow machine shows in what importing JAX
    # takes, about 1.3 s where the limit was set: ten seconds are for those on which it takes up to 2.5 s.
    limit = 0.0
    while len(seconds) < 5 and (len(seconds) == 1 or seconds[-1] >= limit):
        limit = max(10, 4 * _jax_import_seconds(environment))
        seconds.append(_first_token_seconds(environment))
    print(f"first token after {', '.join(f'{s:.1f}' for s in seconds)} s, the limit being {limit:.1f} s")
    assert seconds[-1] < limit
    # Nothing was compiled again.
    names = [path.name for path in sorted((tmp_path / "kvjax" / "xla").iterdir())]
    assert names == [path.name for path in programs]


def _jax_import_seconds(environment):
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import jax"], env=environment, check=True)
    return time.perf_counter() - started


def _first_token_seconds(environment):
    """From the start of the process to the first character of the answer."""
    started = time.perf_counter()
    with subprocess.Popen(
        [*COMMAND, "generate", "What is the capital of France?", "--max-new-tokens", "8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        piece = process.stdout.read(1)
        seconds = time.perf_counter() - started
        rest, err = process.stdout.read(), process.stderr.read()
    assert (process.returncode, (piece + rest).decode()) == (0, f"The capital of France is Paris.{os.linesep}")
    # JAX says nothing.
    assert err.decode().startswith("prefill ")
    assert err.count(b"\n") == 1
    return seconds


def test_the_compilation_cache_of_the_environment_wins(tmp_path):
    program = (
        "import jax; from kvjax.cli.compilation_cache import use_compilation_cache; use_compilation_cache();"
        "print(jax.config.jax_compilation_cache_dir)"
    )
    folders = {"XDG_CACHE_HOME": str(tmp_path / "a"), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "b")}
    done = _python(program, {**os.environ, **folders})
    assert pathlib.Path(done.stdout.strip()) == tmp_path / "b"
    assert not (tmp_path / "a").exists()


def _python(program, environment):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
