"""Scores by hand, and intervals from the literature."""

import math

import pytest

from kvjax.evaluation import string_match_all, string_match_part, wilson
from kvjax.evaluation.summary import _perplexity


@pytest.mark.parametrize(
    ("answer", "references", "share", "part"),
    [
        ("The number is 12345.", ["12345"], 1.0, 1.0),
        ("12344", ["12345"], 0.0, 0.0),
        ("They are 11111 and 22222", ["22222", "33333"], 0.5, 1.0),
        ("APPLE, Pear", ["apple", "pear", "plum"], 2 / 3, 1.0),
        ("", ["apple"], 0.0, 0.0),
        # As in RULER, what occurs counts, however it is written together.
        ("pineapples", ["apple"], 1.0, 1.0),
    ],
)
def test_scores_are_the_share_of_the_references_that_occur(answer, references, share, part):
    assert string_match_all(answer, references) == pytest.approx(share)
    assert string_match_part(answer, references) == part


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    [(1.0, 10, 0.7225, 1.0), (0.0, 10, 0.0, 0.2775), (0.5, 10, 0.2366, 0.7634), (0.9, 100, 0.8256, 0.9448)],
)
def test_wilson_intervals_are_those_of_the_tables(mean, count, low, high):
    assert wilson(mean, count) == pytest.approx((low, high), abs=5e-5)


def test_perplexity_is_exp_of_the_mean_loss():
    estimate = _perplexity([1.0, 2.0, 3.0])
    half = 1.959964 / math.sqrt(3)
    assert estimate == pytest.approx((math.exp(2), math.exp(2 - half), math.exp(2 + half), 3))
    assert _perplexity([1.0]).low == 0.0
