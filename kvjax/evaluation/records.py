"""A run's folder: one JSON line for each answer, and the manifest of how they came about."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.evaluation.contenders import Contender
from kvjax.evaluation.experiment import Case, Experiment, Mode

RESULTS, MANIFEST = "results.jsonl", "manifest.json"


class Record(NamedTuple):
    """What one policy made of one example.

    Attributes:
        policy: the contender's name.
        budget: its budget, or None.
        mode: how it was asked.
        task: the example's.
        length: the example's.
        depth: the example's.
        sample: the example's.
        score: from 0 to 1; for perplexity the mean -log p of a token.
        answer: the model's, or "" for perplexity.
        expected: what a right answer contains.
        prompt_tokens: tokens that the cache had seen before it answered.
        kept_tokens: tokens that a KV head held of them, the mean over layers and heads.
        cache_bytes: of one row's arrays.
    """

    policy: str
    budget: int | float | None
    mode: Mode
    task: str
    length: int
    depth: float | None
    sample: int
    score: float
    answer: str
    expected: tuple[str, ...]
    prompt_tokens: int
    kept_tokens: float
    cache_bytes: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells records from each other."""
        return self[:7]


def record_key(contender: Contender, mode: Mode, case: Case) -> tuple[Any, ...]:
    """The `Record.key` of what is to be measured."""
    return (contender.name, contender.budget, mode, *case)


class Folder:
    """A run's folder.

    Args:
        path: the folder; it is made if it is not there.
        about: what runs in one folder have in common, see `described`.

    Raises:
        ValueError: the folder belongs to another run, or holds other things.
    """

    def __init__(self, path: str | pathlib.Path, about: Mapping[str, Any]):
        check_folder(path, about)
        self.path = pathlib.Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._results = self.path / RESULTS
        self._about = dict(about)
        self.records = {record.key: record for record in self._read()}

    def write_manifest(self, **more: Any) -> None:
        """Writes what is known of the run; a kill in between leaves the manifest before."""
        file, text = self.path / MANIFEST, json.dumps(self._about | more, indent=1, ensure_ascii=False) + "\n"
        part = file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(file)

    def add(self, records: Sequence[Record]) -> None:
        """Appends records; a kill in between leaves whole ones, and at most one line that is none."""
        lines = "".join(json.dumps(record._asdict(), ensure_ascii=False) + "\n" for record in records)
        with self._results.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self.records |= {record.key: record for record in records}

    def _read(self) -> list[Record]:
        if not self._results.exists():
            return []
        content = self._results.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            # The line that was being written when the run was killed.
            self._results.write_bytes(whole)
        return [_record(line) for line in whole.decode("utf-8").splitlines()]


def read_records(path: str | pathlib.Path) -> list[Record]:
    """The records of a run's folder, whole or not."""
    file = pathlib.Path(path) / RESULTS
    content = file.read_bytes()
    return [_record(line) for line in content[: content.rfind(b"\n") + 1].decode("utf-8").splitlines()]


def _record(line: str) -> Record:
    fields = json.loads(line)
    return Record(**{**fields, "expected": tuple(fields["expected"])})


def described(experiment: Experiment, *, model: str) -> dict[str, Any]:
    """What all runs in one folder have in common, as far as it is known before the model is loaded."""
    return {"model": model, "experiment": experiment.describe()}


def check_folder(path: str | pathlib.Path, about: Mapping[str, Any]) -> None:
    """Raises a ValueError unless a folder is empty, missing, or of a run that is the same in all of `about`."""
    folder = pathlib.Path(path)
    file = folder / MANIFEST
    if not file.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"`out` must be a run's folder or an empty one, got {folder}, which holds other things.")
        return
    saved = json.loads(file.read_text(encoding="utf-8"))
    # As JSON gives it back.
    asked = json.loads(json.dumps(about))
    pairs = [(name, saved.get(name), value) for name, value in asked.items() if name != "experiment"]
    settings = saved.get("experiment", {})
    pairs += [(name, settings.get(name), value) for name, value in asked.get("experiment", {}).items()]
    for name, there, value in pairs:
        if there != value:
            raise ValueError(
                f"`out` holds a run with another `{name}`: {folder} has {_short(there)}, not {_short(value)}; go on "
                "with that, or take another folder."
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
