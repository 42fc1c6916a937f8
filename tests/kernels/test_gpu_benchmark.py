"""`benchmarks/gpu_kernels.py`, which answers on a machine with a GPU what no test here can."""

import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_kernels.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)


def test_says_in_a_sentence_that_there_is_no_gpu():
    result = run()
    assert result.returncode == 1
    assert result.stdout == ""
    needed = "The GPU kernels need an NVIDIA GPU of compute capability 9.0 or more"
    assert result.stderr == f"{needed}: JAX finds only cpu.\n"


def test_rehearses_without_a_gpu():
    result = run("--rehearse", "--rounds", "1")
    assert result.returncode == 0, result.stderr
    checks, caches = result.stdout.split("\n\n")[1:]
    assert {line.split("|")[5].strip() for line in checks.splitlines()[2:]} == {"right"}
    timed = [line.split("|") for line in caches.splitlines()[2:]]
    assert [row[2].strip() for row in timed][:2] == ["copy on the device", "xla"]
    assert all(float(row[3]) > 0 for row in timed if "cudnn" not in row[2])
