"""Stretches of a long text, on which perplexity is measured."""

from typing import NamedTuple

import numpy as np

from kvjax.evaluation.experiment import Case, Experiment
from kvjax.prompts import Tokenizer

#: Tokens at the end of a stretch that are foretold; the others are compressed before.
FORETOLD = 48


class Window(NamedTuple):
    """A stretch of a text.

    Attributes:
        context: token ids that are compressed.
        continuation: the `FORETOLD` ids that follow.
    """

    context: list[int]
    continuation: list[int]


class TextWindows:
    """Draws stretches from a text that is tokenised once.

    Args:
        text: plain text; the topics of Python's `help`, half a million characters, by default.
        tokenizer: of the model.
        longest: tokens of the longest stretch that will be asked for.

    Raises:
        ValueError: the text is too short.
    """

    def __init__(self, text: str | None, tokenizer: Tokenizer, *, longest: int):
        ids = tokenizer.encode(_documentation() if text is None else text, add_special_tokens=False)
        # What begins a text, if the model has that.
        self._start = tokenizer.encode("a")
        self._start = self._start[: self._start.index(tokenizer.encode("a", add_special_tokens=False)[0])]
        if len(ids) < longest:
            raise ValueError(
                f"`text` must have at least as many tokens as the longest prompt, {longest}, got {len(ids)}."
            )
        self._ids = ids

    def window(self, experiment: Experiment, case: Case) -> Window:
        """The stretch of a case; `case.length` tokens in all."""
        size = case.length - len(self._start)
        rng = np.random.default_rng(experiment.seed_of(case))
        first = int(rng.integers(len(self._ids) - size + 1))
        ids = [*self._start, *self._ids[first : first + size]]
        return Window(ids[:-FORETOLD], ids[-FORETOLD:])


def _documentation() -> str:
    from pydoc_data import topics

    return " ".join(topics.topics.values())
