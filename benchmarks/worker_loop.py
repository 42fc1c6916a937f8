"""A worker's side of the pipe: a JSON line in, a method called, a JSON line out. Runs on Python 3.11 and newer."""

import json
import os
import sys


def serve(worker: object) -> None:
    """Answers requests until the pipe closes.

    A request {"do": name, ...} calls the method of that name with the other entries; the answer is {"done": result},
    or {"error": text}. What the libraries print goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _answer(answers, {"done": os.getpid()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"done": getattr(worker, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _answer(answers, answer)


def peak_bytes() -> int:
    """The most memory that this process has held at once (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def _answer(answers, answer: dict) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
