"""Several needles, one of which is asked for."""

import dataclasses
from typing import ClassVar

import numpy as np

from kvjax.evaluation.task import Example, Task, hidden
from kvjax.evaluation.tasks.magic_numbers import INTRODUCTION, ask, fact
from kvjax.evaluation.words import distinct_nouns, distinct_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiKeyNeedle(Task):
    """Several keys with a number each; the one that is asked for is at the asked depth, the others anywhere.

    Attributes:
        keys: how many there are.
    """

    keys: int = 4

    name: ClassVar[str] = "multi-key"
    has_depth: ClassVar[bool] = True
    all_or_nothing: ClassVar[bool] = True

    def example(self, filler: int, *, depth: float, seed: int) -> Example:
        """See `Task.example`."""
        rng = np.random.default_rng([seed, 0])
        keys, numbers = distinct_nouns(rng, self.keys), distinct_numbers(rng, self.keys)
        depths = [depth, *rng.random(self.keys - 1)]
        facts = [(place, fact(*pair)) for place, *pair in zip(depths, keys, numbers, strict=True)]
        return Example(INTRODUCTION + hidden(facts, filler=filler, seed=seed), (ask(keys[:1], numbers[:1]),))
