"""The most common words of a long list."""

import dataclasses
from typing import ClassVar

import numpy as np

from kvjax.evaluation.task import Example, Task, Turn
from kvjax.evaluation.words import vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonWords(Task):
    """A numbered list in which a few words come often and all others once; which come often?

    Differs from RULER: there, 10 words come 30 times each and the others 3 times; here 3 words have a quarter of the
    list each, so that a long list is no harder than a short one, and SmolLM2 can tell.

    Attributes:
        common: words that come often.
        share: of the list, for each of them.
    """

    common: int = 3
    share: float = 0.25

    name: ClassVar[str] = "common-words"

    def example(self, filler: int, *, depth: float, seed: int) -> Example:
        """See `Task.example`. The filler is the words that come once, and four are always there."""
        del depth
        words = vocabulary(np.random.default_rng([seed, 0]))
        common, rare = words[: self.common], words[self.common :]
        if filler + 4 > len(rare):
            raise ValueError(f"`lengths`: {self.name} has {len(rare)} words to fill a list with, too few for it.")
        text = self._list(common, rare[: filler + 4], seed=seed)
        introduction = (
            "Below is a numbered list of words. Some come more often than the others. Remember those that come most "
            "often.\n\n"
        )
        turn = Turn(
            f"What are the {self.common} words that come most often in the list above?",
            f"The {self.common} words that come most often in the list above are: 1.",
            tuple(common),
        )
        return Example(introduction + text, (turn,))

    def _list(self, common: list[str], rare: list[str], *, seed: int) -> str:
        """The rare words once, and each common one so often that it has its share."""
        times = max(2, round(self.share * len(rare) / (1 - self.share * self.common)))
        entries = np.random.default_rng([seed, 1]).permutation([*common * times, *rare])
        return "\n".join(f"{place}. {entry}" for place, entry in enumerate(entries, start=1))
