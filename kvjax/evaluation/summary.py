"""What a run has measured: mean scores with confidence intervals."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax.evaluation.contenders import Contender
from kvjax.evaluation.experiment import PERPLEXITY, Experiment, Mode
from kvjax.evaluation.records import Record

#: Of a normal distribution, the quantile that leaves 2.5 % above it.
_Z = 1.959964


class Estimate(NamedTuple):
    """A mean, and the interval that holds the true one with 95 % confidence.

    Attributes:
        mean: of the scores; of perplexity exp of the mean -log p.
        low: the interval's start.
        high: its end.
        examples: how many.
    """

    mean: float
    low: float
    high: float
    examples: int


class Summary(NamedTuple):
    """A run's records, to be looked up.

    Attributes:
        experiment: what was measured.
        records: all of them.
    """

    experiment: Experiment
    records: list[Record]

    def of(self, contender: Contender, **wanted: Any) -> list[Record]:
        """A contender's records with these fields."""
        wanted |= {"policy": contender.name, "budget": contender.budget}
        return [r for r in self.records if all(getattr(r, name) == value for name, value in wanted.items())]

    def score(self, contender: Contender, *, mode: Mode, **wanted: Any) -> Estimate | None:
        """The mean score of all tasks but perplexity, each counting alike, or of one `task`."""
        records = [record for record in self.of(contender, mode=mode, **wanted) if record.task != PERPLEXITY]
        return _score(records) if records else None

    def perplexity(self, contender: Contender, *, length: int) -> Estimate | None:
        """Of the foretold tokens."""
        losses = [record.score for record in self.of(contender, task=PERPLEXITY, length=length)]
        return _perplexity(losses) if losses else None

    def kept_tokens(self, contender: Contender, *, length: int) -> float:
        """Tokens that a KV head held, the mean of all answers to prompts of a length."""
        return float(np.mean([record.kept_tokens for record in self.of(contender, length=length)]))

    def cache_bytes(self, contender: Contender, *, length: int) -> float:
        """Bytes of a row's cache, the mean of all answers to prompts of a length."""
        return float(np.mean([record.cache_bytes for record in self.of(contender, length=length)]))


def summarised(records: Iterable[Record], experiment: Experiment) -> Summary:
    """The records in an order that does not depend on when they came."""
    return Summary(experiment, sorted(records, key=lambda record: tuple(map(str, record.key))))


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    It also serves means of scores between 0 and 1: their variance is at most mean * (1 - mean), that of a share. It
    is then too wide rather than too narrow, and does not shrink to nothing where all examples score alike, as a
    bootstrap would.
    """
    shrink = 1 + _Z**2 / count
    centre = (mean + _Z**2 / (2 * count)) / shrink
    half = _Z * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2)) / shrink
    # The ends are exact at 0 and 1, where rounding would put them a hair inside.
    return (0.0 if mean == 0 else max(centre - half, 0.0)), (1.0 if mean == 1 else min(centre + half, 1.0))


def _score(records: Sequence[Record]) -> Estimate:
    mean = min(float(np.mean([record.score for record in records])), 1.0)
    return Estimate(mean, *wilson(mean, len(records)), len(records))


def _perplexity(losses: Sequence[float]) -> Estimate:
    """Exp of the mean, with the normal interval of the mean; without end where there is one example."""
    mean, count = float(np.mean(losses)), len(losses)
    half = _Z * float(np.std(losses, ddof=1)) / math.sqrt(count) if count > 1 else math.inf
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0)), count)


def measured_sizes(summary: Summary) -> list[dict[str, Any]]:
    """For the manifest: the mean budget and the bytes that each contender really had."""
    experiment = summary.experiment
    return [
        {
            "policy": contender.name,
            "budget": contender.budget,
            "length": length,
            "kept_tokens": round(summary.kept_tokens(contender, length=length), 2),
            "cache_bytes_a_row": round(summary.cache_bytes(contender, length=length)),
        }
        for contender in experiment.contenders
        for length in experiment.lengths
    ]
