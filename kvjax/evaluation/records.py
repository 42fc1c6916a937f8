"""A run's folder: one JSON line for each answer, and the manifest of how they came about."""

import json
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.evaluation.contenders import Contender
from kvjax.evaluation.experiment import MODES, Case, Experiment, Mode
from kvjax.fields import Fields
from kvjax.files import append_lines, check_writable, is_free, parse_json, read_bytes, read_json, reading, write_json

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


class DamagedRecordsWarning(UserWarning):
    """Some lines of a run's results are no records, and are left out."""


class Folder:
    """A run's folder.

    Args:
        path: the folder; it is made if it is not there.
        about: what runs in one folder have in common, see `described`.

    Raises:
        ValueError: the folder belongs to another run, holds other things, or cannot be written or read.
    """

    def __init__(self, path: str | pathlib.Path, about: Mapping[str, Any]):
        check_folder(path, about)
        self.path = pathlib.Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._results = self.path / RESULTS
        self._about = dict(about)
        self.records = {record.key: record for record in _read(self._results)} if self._results.exists() else {}

    def write_manifest(self, **more: Any) -> None:
        """Writes what is known of the run; a kill in between leaves the manifest before."""
        write_json(self.path / MANIFEST, self._about | more)

    def add(self, records: Sequence[Record]) -> None:
        """Appends records; a kill or a full disk leaves whole ones, and at most one line that is none.

        Raises:
            OSError: they cannot be written; what was there before is as it was.
        """
        append_lines(self._results, [json.dumps(record._asdict()) for record in records])
        self.records |= {record.key: record for record in records}


def read_records(path: str | pathlib.Path) -> list[Record]:
    """The records of a run's folder, whole or not.

    Half a line, as a kill or a full disk leaves it, is left out; so are other lines that are no records, such as a
    power loss leaves, with a warning that counts them.

    Raises:
        ValueError: there are no results, or they cannot be read.
    """
    return _read(pathlib.Path(path) / RESULTS)


def _read(file: pathlib.Path) -> list[Record]:
    # Only b"\n" ends a line; `splitlines` also ends them at U+2028, which an answer may have.
    lines = read_bytes(file).split(b"\n")
    if not lines[-1]:
        lines.pop()
    records, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(_record(line, f"{file}, line {number}"))
        except ValueError as error:
            # Half a line is what every kill may leave, and is no damage.
            if not line.startswith(b"{") or line.endswith(b"}"):
                damaged.append(str(error))
    if damaged:
        warnings.warn(
            f"{file}: {len(damaged)} of {len(lines)} lines are no records and are left out, the first because: "
            f"{damaged[0]}",
            DamagedRecordsWarning,
            stacklevel=3,
        )
    return records


def _record(line: bytes, source: str) -> Record:
    """A record of its line, which a power loss may have put NULs before.

    Raises:
        ValueError: it is none; names the line and the field.
    """
    with reading(source, what="a record"):
        values = parse_json(line.strip(b"\0 \t\r").decode("utf-8"), source=source)
    if not isinstance(values, dict):
        raise ValueError(f"{source} must be a JSON object, got {type(values).__name__}.")
    fields = Fields(values, source=source)
    unknown = values.keys() - set(Record._fields)
    if unknown:
        raise ValueError(f"{source}: `{min(unknown)}` is no field of a record.")
    return Record(
        policy=fields.text("policy"),
        budget=_budget(fields),
        mode=fields.choice("mode", MODES),
        task=fields.text("task"),
        length=fields.integer("length", at_least=1),
        depth=fields.number("depth", None, at_least=0.0, at_most=1.0),
        sample=fields.integer("sample"),
        score=_score(fields),
        answer=fields.text("answer"),
        expected=tuple(fields.texts("expected")),
        prompt_tokens=fields.integer("prompt_tokens"),
        kept_tokens=fields.number("kept_tokens", at_least=0.0),
        cache_bytes=fields.integer("cache_bytes"),
    )


def _score(fields: Fields) -> float:
    # A model that overflows foretells with NaN.
    score = fields.take("score")
    return score if isinstance(score, float) else fields.number("score")


def _budget(fields: Fields) -> int | float | None:
    if isinstance(fields.take("budget", None), float):
        return fields.number("budget", at_least=0.0, at_most=1.0)
    return fields.integer("budget", None, at_least=1)


def described(experiment: Experiment, *, model: str) -> dict[str, Any]:
    """What all runs in one folder have in common, as far as it is known before the model is loaded."""
    return {"model": model, "experiment": experiment.describe()}


def check_folder(path: str | pathlib.Path, about: Mapping[str, Any]) -> None:
    """Raises a ValueError unless a run can go on in a folder, or begin.

    It must be empty, missing or of a run that is the same in all of `about`, and files must be possible there.
    """
    folder = pathlib.Path(path)
    check_writable(folder, argument="out")
    file = folder / MANIFEST
    if not file.exists():
        if not is_free(folder):
            raise ValueError(f"`out` must be a run's folder or an empty one, got {folder}, which holds other things.")
        return
    manifest = Fields(read_json(file), source=file)
    # As JSON gives it back.
    asked = json.loads(json.dumps(about))
    pairs = [(name, manifest.take(name, None), value) for name, value in asked.items() if name != "experiment"]
    settings = manifest.nested("experiment")
    pairs += [(name, settings.take(name, None), value) for name, value in asked.get("experiment", {}).items()]
    for name, there, value in pairs:
        if there != value:
            raise ValueError(
                f"`out` holds a run with another `{name}`: {folder} has {_short(there)}, not {_short(value)}; go on "
                "with that, or take another folder."
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
