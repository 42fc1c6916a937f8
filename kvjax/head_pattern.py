"""Which heads retrieve: DuoAttention's patterns, in the format that they are published in."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.fields import Fields
from kvjax.files import newest_file, read_json, read_text, reading, write_together

_SCORES, _CONFIG = "full_attention_heads.tsv", "config.json"
#: How the fields of config.json are called here.
_SIZES = {"sinks": "sink_size", "recent": "recent_size"}
_LIMIT = 16 * 1024 * 1024


@dataclasses.dataclass(frozen=True)
class HeadPattern:
    """How much each KV head needs the full cache: 1 for a retrieval head, 0 for a streaming head.

    Attributes:
        scores: [layers][KV heads], each in [0, 1].
        sinks: tokens from the start that streaming heads kept when the scores were learned, if known.
        recent: tokens from the end, likewise.
    """

    scores: tuple[tuple[float, ...], ...]
    sinks: int | None = None
    recent: int | None = None

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0):
                raise ValueError(f"`{name}` must be an integer that is not negative, or None, got {size!r}.")

    @classmethod
    def of(cls, scores: Sequence[Sequence[float]] | np.ndarray, **settings: int | None) -> "HeadPattern":
        """A pattern from any [layers, KV heads] of numbers, clipped to [0, 1].

        Raises:
            ValueError: rows of different lengths, or numbers that are not finite.
        """
        try:
            array = np.asarray(scores, np.float64)
        except ValueError:
            array = np.zeros(0)
        if array.ndim != 2 or not array.size:
            raise ValueError("`scores` must be [layers, KV heads], with rows of one length.")
        if not np.isfinite(array).all():
            raise ValueError("`scores` must be finite.")
        clipped: Any = np.clip(array, 0.0, 1.0).tolist()
        return cls(tuple(map(tuple, clipped)), **settings)

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> "HeadPattern":
        """Reads `full_attention_heads.tsv`, and `config.json` where there is one; values are clipped to [0, 1].

        Raises:
            ValueError: no such file, a line that is not numbers, or a configuration that cannot be read; names the
                file.
        """
        folder = pathlib.Path(folder)
        file = newest_file(folder, _SCORES)
        if not file.exists():
            raise ValueError(f"a head pattern is a folder with {_SCORES}, got {folder}.")
        # Orders of magnitude more than the heads of any model.
        lines = read_text(file, limit=_LIMIT).splitlines()
        rows = [_numbers(line, f"{file}, line {number},") for number, line in enumerate(lines, 1) if line.strip()]
        if not rows or len({len(row) for row in rows}) != 1:
            raise ValueError(f"{file} must have as many numbers in every line.")
        config = newest_file(folder, _CONFIG)
        sizes = _read_sizes(config) if config.exists() else {}
        with reading(file, what="a head pattern"):
            return cls.of(rows, **sizes)

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the pattern so that the authors' code and `load` can read it.

        An older pattern there stays whole until this one is.
        """
        write_together(folder, self.files)

    @property
    def files(self) -> dict[str, str]:
        """What `save` writes, by the names of the files."""
        lines = ["\t".join(repr(score) for score in row) for row in self.scores]
        config = {"sink_size": self.sinks, "recent_size": self.recent}
        known = {name: size for name, size in config.items() if size is not None}
        return {_SCORES: "\n".join(lines) + "\n", _CONFIG: json.dumps(known, indent=1) + "\n"}

    def streaming_heads(
        self, *, sparsity: float | None = None, threshold: float | None = None
    ) -> tuple[tuple[bool, ...], ...]:
        """Which heads stream, [layers][KV heads].

        Args:
            sparsity: the share of streaming heads: the round(sparsity * heads) lowest scores, of equal ones the first.
            threshold: or: heads with a score below it.

        Raises:
            ValueError: not exactly one of the two, or one outside [0, 1].
        """
        if (sparsity is None) == (threshold is None):
            raise ValueError(f"one of `sparsity` and `threshold` must be given, got {sparsity} and {threshold}.")
        for name, value in (("sparsity", sparsity), ("threshold", threshold)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"`{name}` must be from 0 to 1, got {value}.")
        return _streaming(self.scores, sparsity, threshold)


# Asked for anew for every layer.
@functools.lru_cache(maxsize=64)
def _streaming(
    scores: tuple[tuple[float, ...], ...], sparsity: float | None, threshold: float | None
) -> tuple[tuple[bool, ...], ...]:
    array = np.asarray(scores)
    if sparsity is None:
        streaming = array < threshold
    else:
        order = np.argsort(array, axis=None, kind="stable")
        streaming = np.zeros(array.size, bool)
        streaming[order[: round(sparsity * array.size)]] = True
        streaming = streaming.reshape(array.shape)
    return tuple(tuple(map(bool, row)) for row in streaming)


def _numbers(line: str, source: str) -> list[float]:
    try:
        return [float(cell) for cell in line.split()]
    except ValueError:
        shown = line if len(line) <= 100 else f"{line[:97]}..."
        raise ValueError(f"{source} must be numbers between tabs, got {shown!r}.") from None


def _read_sizes(file: pathlib.Path) -> dict[str, int | None]:
    try:
        config = Fields(read_json(file, limit=_LIMIT), source=file)
        return {name: config.integer(field, None) for name, field in _SIZES.items()}
    except ValueError as error:
        raise ValueError(
            f"{file} must be a JSON object whose `sink_size` and `recent_size` are whole numbers ({error})"
        ) from error
