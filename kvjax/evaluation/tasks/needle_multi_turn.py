"""Several needles, asked for one after another."""

import dataclasses
from typing import ClassVar

import numpy as np

from kvjax.evaluation.task import Example, Task, hidden
from kvjax.evaluation.tasks.magic_numbers import INTRODUCTION, ask, fact
from kvjax.evaluation.words import distinct_nouns, distinct_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiTurnNeedle(Task):
    """Several keys with a number each; one is asked for first, and another, at the asked depth, in the next turn.

    What is compressed with the first question in sight cannot know the second. The first answer is the right one,
    whatever the model would say, so that all policies go on from the same words.

    Attributes:
        keys: how many there are; the others are never asked for.
    """

    keys: int = 2

    name: ClassVar[str] = "multi-turn"
    has_depth: ClassVar[bool] = True
    all_or_nothing: ClassVar[bool] = True

    def example(self, filler: int, *, depth: float, seed: int) -> Example:
        """See `Task.example`."""
        rng = np.random.default_rng([seed, 0])
        keys, numbers = distinct_nouns(rng, self.keys), distinct_numbers(rng, self.keys)
        depths = [*rng.random(self.keys - 1), depth]
        facts = [(place, fact(*pair)) for place, *pair in zip(depths, keys, numbers, strict=True)]
        turns = (ask(keys[:1], numbers[:1]), ask(keys[-1:], numbers[-1:]))
        return Example(INTRODUCTION + hidden(facts, filler=filler, seed=seed), turns)
