"""A needle in a haystack: one number to find."""

import dataclasses
from typing import ClassVar

import numpy as np

from kvjax.evaluation.task import Example, Task, hidden
from kvjax.evaluation.tasks.magic_numbers import INTRODUCTION, ask, fact
from kvjax.evaluation.words import distinct_nouns, distinct_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleNeedle(Task):
    """One key with one number, at the asked depth."""

    name: ClassVar[str] = "needle"
    has_depth: ClassVar[bool] = True
    all_or_nothing: ClassVar[bool] = True

    def example(self, filler: int, *, depth: float, seed: int) -> Example:
        """See `Task.example`."""
        rng = np.random.default_rng([seed, 0])
        (key,), (number,) = distinct_nouns(rng, 1), distinct_numbers(rng, 1)
        text = hidden([(depth, fact(key, number))], filler=filler, seed=seed)
        return Example(INTRODUCTION + text, (ask([key], [number]),))
