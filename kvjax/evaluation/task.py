"""What a task is: a text, questions about it, and their answers."""

import abc
from typing import ClassVar, NamedTuple

import numpy as np

from kvjax.evaluation.needle import plain_sentence
from kvjax.evaluation.scoring import string_match_all


class Turn(NamedTuple):
    """A question about a context.

    Attributes:
        question: what is asked.
        prefix: how the answer begins; given to the model, so that it says little else.
        answers: what a right answer contains.
    """

    question: str
    prefix: str
    answers: tuple[str, ...]

    @property
    def reference(self) -> str:
        """The right answer, behind its prefix."""
        return f" {listed(self.answers)}."


class Example(NamedTuple):
    """One text and what is asked about it.

    Attributes:
        context: the long text; what the query-agnostic way compresses alone.
        turns: questions in the order in which they are asked. All but the last are answered rightly in the prompt;
            the last is what the model answers.
    """

    context: str
    turns: tuple[Turn, ...]


class Task(abc.ABC):
    """Makes examples from seeds, and scores answers; a subclass is a frozen dataclass whose settings make it hard.

    The settings of RULER (Hsieh et al., arXiv 2404.06654) are made for models of billions of parameters; where
    SmolLM2-135M with its full cache fails at them, the defaults are easier, and the docstring says how.
    """

    #: What the command calls it.
    name: ClassVar[str]
    #: Whether `example` looks at `depth`.
    has_depth: ClassVar[bool] = False
    #: Whether scores are 0 or 1 only.
    all_or_nothing: ClassVar[bool] = False

    @abc.abstractmethod
    def example(self, filler: int, *, depth: float, seed: int) -> Example:
        """An example with so much text around what matters.

        Args:
            filler: sentences, or words, that say nothing; more make it longer.
            depth: where the answer lies: 0 at the start, 1 at the end.
            seed: of everything; what is asked does not depend on `filler`.
        """

    def score(self, answer: str, answers: tuple[str, ...]) -> float:
        """How right an answer is, from 0 to 1."""
        return string_match_all(answer, answers)


def listed(words: tuple[str, ...] | list[str]) -> str:
    """Words as English lists them: "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def hidden(facts: list[tuple[float, str]], *, filler: int, seed: int) -> str:
    """Facts among so many sentences that say nothing.

    Args:
        facts: each with its depth, 0 to 1.
        filler: sentences.
        seed: of the sentences; the first ones are the same however many there are.
    """
    rng = np.random.default_rng([seed, 1])
    sentences = [plain_sentence(rng) for _ in range(filler)]
    # From the back, so that places stay those in the filler; of equal depths the first fact comes first.
    for depth, fact in sorted(facts, key=lambda pair: pair[0])[::-1]:
        sentences.insert(round(depth * filler), fact)
    return " ".join(sentences)
