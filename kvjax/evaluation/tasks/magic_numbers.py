"""The sentences that needles are: special magic numbers, as RULER has them."""

from collections.abc import Sequence

from kvjax.evaluation.task import Turn, listed

INTRODUCTION = "Some special magic numbers are hidden in the following text. Remember them.\n\n"


def fact(key: str, number: str) -> str:
    """A needle."""
    return f"One of the special magic numbers for {key} is: {number}."


def ask(keys: Sequence[str], numbers: Sequence[str]) -> Turn:
    """The question for all numbers of the keys."""
    several = len(numbers) > 1
    what = f"special magic number{'s' if several else ''} for {listed(list(keys))} mentioned in the provided text"
    verb = "are" if several else "is"
    question = f"What {verb} {'all ' if several else ''}the {what}?"
    return Turn(question, f"The {what} {verb}", tuple(numbers))
