"""How answers are scored: as in RULER (arXiv 2404.06654), by what occurs in them, whatever the case."""

from collections.abc import Sequence


def string_match_all(answer: str, references: Sequence[str]) -> float:
    """The share of the references that occur in an answer."""
    answer = answer.lower()
    return sum(reference.lower() in answer for reference in references) / len(references)


def string_match_part(answer: str, references: Sequence[str]) -> float:
    """1 if any of the references occurs in an answer, else 0."""
    return float(string_match_all(answer, references) > 0)
