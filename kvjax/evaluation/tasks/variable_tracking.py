"""Variables assigned to each other across a long text."""

import dataclasses
import string
from typing import ClassVar

import numpy as np

from kvjax.evaluation.task import Example, Task, Turn, hidden
from kvjax.evaluation.words import distinct_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableTracking(Task):
    """Chains of assignments, VAR A = 12345, VAR B = VAR A, ..., in order, anywhere; which variables have a value?

    Attributes:
        chains: with a value each; one is asked for.
        hops: assignments of a chain after its first; RULER has 4.
    """

    chains: int = 1
    hops: int = 1

    name: ClassVar[str] = "variable-tracking"

    def example(self, filler: int, *, depth: float, seed: int) -> Example:
        """See `Task.example`."""
        del depth
        rng = np.random.default_rng([seed, 0])
        length = self.hops + 1
        names = self._names(rng, self.chains * length)
        values = distinct_numbers(rng, self.chains)
        facts: list[tuple[float, str]] = []
        for chain, value in enumerate(values):
            mine = names[chain * length : (chain + 1) * length]
            sources = [value, *(f"VAR {name}" for name in mine[:-1])]
            lines = [f"VAR {name} = {source}." for name, source in zip(mine, sources, strict=True)]
            facts += zip(np.sort(rng.random(length)).tolist(), lines, strict=True)
        introduction = "Keep track of the variables that are assigned in the following text.\n\n"
        turn = Turn(
            f"Which variables are assigned the value {values[0]} in the text above, directly or through another?",
            f"The {length} variables that are assigned the value {values[0]} are VAR",
            tuple(names[:length]),
        )
        return Example(introduction + hidden(facts, filler=filler, seed=seed), (turn,))

    @staticmethod
    def _names(rng: np.random.Generator, count: int) -> list[str]:
        """Different names of three capitals."""
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(rng.choice(list(string.ascii_uppercase), 3))] = None
        return list(names)
