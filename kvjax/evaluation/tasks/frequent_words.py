"""The most frequent of coded words, whose frequencies fall as those of a language do."""

import dataclasses
import string
from typing import ClassVar

import numpy as np

from kvjax.evaluation.task import Example, Task, Turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequentWords(Task):
    """Coded words, the k-th one k ** -alpha times as often as the first; which are the most frequent?

    Differs from RULER: counts are exactly those of the law, where RULER draws them, so that the answer is never a
    matter of luck; there is no row of dots that is more frequent than all words and is to be ignored; and words are
    numbered, of three letters, and only the first is asked for, which is what SmolLM2 can do.

    Attributes:
        alpha: how steeply frequencies fall; 2 in RULER.
        asked: how many are asked for; 3 in RULER.
        size: letters of a word; 6 in RULER.
    """

    alpha: float = 2.0
    asked: int = 1
    size: int = 3

    name: ClassVar[str] = "frequent-words"

    def example(self, filler: int, *, depth: float, seed: int) -> Example:
        """See `Task.example`. At least so many words that the asked ones differ in their counts."""
        del depth
        shares = np.arange(1.0, 200.0) ** -self.alpha
        fewest = int(np.ceil(2 / (shares[self.asked - 1] - shares[self.asked]) * shares.sum()))
        counts = np.round((fewest + filler) * shares / shares.sum()).astype(int)
        counts = counts[counts > 0]
        words = self._words(np.random.default_rng([seed, 0]), len(shares))[: len(counts)]
        entries = np.random.default_rng([seed, 1]).permutation(np.repeat(words, counts))
        text = " ".join(f"{place}. {entry}" for place, entry in enumerate(entries, start=1))
        introduction = "Below is a numbered list of coded words. Keep track of how often each of them comes.\n\n"
        several = self.asked > 1
        what = f"{self.asked} most frequent words" if several else "most frequent word"
        verb = "are" if several else "is"
        turn = Turn(
            f"What {verb} the {what} in the list above?",
            f"The {what} in the list {verb}: 1.",
            tuple(words[: self.asked]),
        )
        return Example(introduction + text, (turn,))

    def _words(self, rng: np.random.Generator, count: int) -> list[str]:
        """Different words of random letters."""
        words: dict[str, None] = {}
        while len(words) < count:
            words["".join(rng.choice(list(string.ascii_lowercase), self.size))] = None
        return list(words)
