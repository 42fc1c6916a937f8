"""The command's side of the pipe: starts a worker, asks it, and sees what else the machine did meanwhile."""

import json
import pathlib
import subprocess
import sys
import time
from typing import Any, NamedTuple

import psutil

HERE = pathlib.Path(__file__).parent


class WorkerError(RuntimeError):
    """The worker could not do what was asked, or is gone."""


class Answer(NamedTuple):
    """What a request gave.

    Attributes:
        done: the result.
        others: the share of the machine's processors that other processes had meanwhile.
    """

    done: Any
    others: float


class WorkerClient:
    """A worker process: "kvjax float32", "kvpress bfloat16", ..., with a checkpoint."""

    def __init__(self, who: str, model: pathlib.Path):
        library, dtype = who.split()
        self.who = who
        self._process = subprocess.Popen(
            [*_command(library), str(model), dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        # The process that was started may be one that started the worker.
        self._worker = psutil.Process(self._read())

    def ask(self, do: str, **arguments: Any) -> Answer:
        """Calls a method of the worker and waits for it."""
        assert self._process.stdin is not None
        started, busy, own = time.perf_counter(), _busy_seconds(), self._own_seconds()
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError("the worker is gone") from None
        done = self._read()
        others = (_busy_seconds() - busy) - (self._own_seconds() - own)
        return Answer(done, max(others, 0.0) / (time.perf_counter() - started) / (psutil.cpu_count() or 1))

    def close(self) -> None:
        """Ends the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"the worker ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["done"]

    def _own_seconds(self) -> float:
        times = self._worker.cpu_times()
        return times.user + times.system


def _command(library: str) -> list[str]:
    """Each side runs in an environment of its own: the project's, and the one that the worker's metadata describe."""
    if library == "kvjax":
        return [sys.executable, str(HERE / "kvjax_worker.py")]
    return ["uv", "run", "--quiet", "--script", str(HERE / "kvpress_worker.py")]


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)
