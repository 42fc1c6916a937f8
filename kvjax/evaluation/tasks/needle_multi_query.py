"""Several needles, all asked for at once."""

import dataclasses
from typing import ClassVar

import numpy as np

from kvjax.evaluation.task import Example, Task, hidden
from kvjax.evaluation.tasks.magic_numbers import INTRODUCTION, ask, fact
from kvjax.evaluation.words import distinct_nouns, distinct_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiQueryNeedle(Task):
    """Several keys with a number each, anywhere; all are asked for in one question.

    Attributes:
        queries: keys; RULER has 4.
    """

    queries: int = 2

    name: ClassVar[str] = "multi-query"

    def example(self, filler: int, *, depth: float, seed: int) -> Example:
        """See `Task.example`."""
        del depth
        rng = np.random.default_rng([seed, 0])
        keys, numbers = distinct_nouns(rng, self.queries), distinct_numbers(rng, self.queries)
        depths = rng.random(self.queries)
        facts = [(place, fact(*pair)) for place, *pair in zip(depths, keys, numbers, strict=True)]
        return Example(INTRODUCTION + hidden(facts, filler=filler, seed=seed), (ask(keys, numbers),))
