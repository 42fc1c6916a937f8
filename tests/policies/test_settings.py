"""Settings that a policy does not have, as those who know kvpress type them."""

import copy
import pickle
from typing import Any

import pytest

import kvjax

# A type checker would refuse these settings.
untyped: Any = kvjax
pytestmark = pytest.mark.usefixtures("no_shape_checks")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: untyped.SnapKV(compression_ratio=0.5),
            r"SnapKV has no setting `compression_ratio`: its settings are `budget`, .*`SnapKV.kvpress\(compression_rat",
        ),
        (
            lambda: untyped.SnapKV(window_size=64),
            r"no setting `window_size`: .* window_size=\.\.\., kernel_size=\.\.\.\)",
        ),
        (lambda: untyped.Knorm(compression_ratio=0.5), r"`Knorm.kvpress\(compression_ratio=\.\.\.\)` takes kvpress's"),
        (lambda: untyped.TOVA(budget=8, heads_of="x"), r"TOVA has no setting `heads_of`: its settings are [^.]*\.$"),
        (lambda: untyped.SnapKV(window=8), r"SnapKV needs `budget`\."),
        (
            lambda: untyped.SnapKV(1024),
            r"takes its settings by name, such as `SnapKV\(budget=1024\)`, got 1024 without",
        ),
        (lambda: untyped.Full(budget=8), r"Full has no setting `budget`: it has none\."),
    ],
)
def test_a_setting_that_a_policy_does_not_have_is_one_sentence(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_policies_are_copied_and_pickled():
    policy = kvjax.SnapKV(budget=64)
    assert copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy
