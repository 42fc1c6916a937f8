"""Several needles with one key."""

import dataclasses
from typing import ClassVar

import numpy as np

from kvjax.evaluation.task import Example, Task, hidden
from kvjax.evaluation.tasks.magic_numbers import INTRODUCTION, ask, fact
from kvjax.evaluation.words import distinct_nouns, distinct_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiValueNeedle(Task):
    """One key with several numbers, anywhere; all are asked for.

    Attributes:
        values: numbers of the key; RULER has 4.
    """

    values: int = 2

    name: ClassVar[str] = "multi-value"

    def example(self, filler: int, *, depth: float, seed: int) -> Example:
        """See `Task.example`."""
        del depth
        rng = np.random.default_rng([seed, 0])
        (key,), numbers = distinct_nouns(rng, 1), distinct_numbers(rng, self.values)
        facts = [(place, fact(key, number)) for place, number in zip(rng.random(self.values), numbers, strict=True)]
        return Example(INTRODUCTION + hidden(facts, filler=filler, seed=seed), (ask([key], numbers),))
