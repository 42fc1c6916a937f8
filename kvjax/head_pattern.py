"""Which heads retrieve: DuoAttention's patterns, in the format that they are published in."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_SCORES, _CONFIG = "full_attention_heads.tsv", "config.json"


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
            ValueError: no such file, a line that is not numbers, or a configuration that cannot be read.
        """
        folder = pathlib.Path(folder)
        file = folder / _SCORES
        if not file.is_file():
            raise ValueError(f"a head pattern is a folder with {_SCORES}, got {folder}.")
        rows = []
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                rows.append([float(cell) for cell in line.split()])
            except ValueError:
                raise ValueError(f"{file}, line {number}, must be numbers between tabs, got {line!r}.") from None
        if not rows or len({len(row) for row in rows}) != 1:
            raise ValueError(f"{file} must have as many numbers in every line.")
        config = _read_config(folder / _CONFIG) if (folder / _CONFIG).is_file() else {}
        return cls.of(rows, sinks=config.get("sink_size"), recent=config.get("recent_size"))

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the pattern so that the authors' code and `load` can read it."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["\t".join(repr(score) for score in row) for row in self.scores]
        (folder / _SCORES).write_text("\n".join(lines) + "\n")
        config = {"sink_size": self.sinks, "recent_size": self.recent}
        (folder / _CONFIG).write_text(json.dumps({k: v for k, v in config.items() if v is not None}, indent=1) + "\n")

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
        scores = np.asarray(self.scores)
        for name, value in (("sparsity", sparsity), ("threshold", threshold)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"`{name}` must be from 0 to 1, got {value}.")
        if sparsity is None:
            streaming = scores < threshold
        else:
            order = np.argsort(scores, axis=None, kind="stable")
            streaming = np.zeros(scores.size, bool)
            streaming[order[: round(sparsity * scores.size)]] = True
            streaming = streaming.reshape(scores.shape)
        return tuple(tuple(map(bool, row)) for row in streaming)


def _read_config(file: pathlib.Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError:
        config = None
    if not isinstance(config, dict) or not all(
        config.get(size) is None or type(config[size]) is int for size in ("sink_size", "recent_size")
    ):
        raise ValueError(f"{file} must be a JSON object whose `sink_size` and `recent_size` are whole numbers.")
    return config
