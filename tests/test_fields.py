"""Values of foreign files: each is checked as it is taken, and what is wrong is named."""

import math

import pytest

from kvjax.fields import LARGEST, Fields

GOOD = Fields(
    {"m.n": 3, "m.x": 2, "m.f": True, "m.t": "a", "m.ns": [1, 2], "m.ts": ["a"], "m.o": {"y": 1.5}, "m.none": None},
    source="file.json",
    prefix="m.",
)


def test_values_are_taken_with_their_types():
    assert (GOOD.integer("n"), GOOD.number("x"), GOOD.flag("f"), GOOD.text("t")) == (3, 2.0, True, "a")
    assert type(GOOD.number("x")) is float
    assert (GOOD.integers("ns"), GOOD.texts("ts"), GOOD.choice("t", ("a", "b"))) == ([1, 2], ["a"], "a")
    assert GOOD.nested("o").number("y") == 1.5
    assert "n" in GOOD
    assert "none" not in GOOD


def test_what_is_absent_or_null_has_its_default():
    readers = (GOOD.integer, GOOD.number, GOOD.flag, GOOD.text, GOOD.integers, GOOD.texts, GOOD.nested, GOOD.take)
    for name in ("none", "nothing"):
        for reader in readers:
            assert reader(name, None) is None
            with pytest.raises(ValueError, match=rf"^file.json: `m.{name}` is missing\.$"):
                reader(name)
        assert GOOD.choice(name, ("a",), None) is None


WRONG = [
    ("integer", True, "must be an integer, got True"),
    ("integer", 2.0, "must be an integer, got 2.0"),
    ("integer", -1, rf"must be from 0 to {LARGEST}, got -1"),
    ("integer", 10**400, rf"must be from 0 to {LARGEST}, got 1000"),
    ("number", True, "must be a number, got True"),
    ("number", "1", "must be a number, got '1'"),
    ("number", math.nan, "must be finite, got nan"),
    ("number", -math.inf, "must be finite, got -inf"),
    ("number", 10**400, "must be finite, got 1000"),
    ("flag", 1, "must be true or false, got 1"),
    ("text", 1, "must be a string, got 1"),
    ("integers", 1, "must be a list of integers from 0 .* got 1"),
    ("integers", [1, True], r"must be a list of integers from 0 .* got \[1, True\]"),
    ("texts", "abc", "must be a list of strings, got 'abc'"),
    ("texts", [1], r"must be a list of strings, got \[1\]"),
    ("nested", [], r"must be an object, got \[\]"),
]


@pytest.mark.parametrize(("reader", "value", "message"), WRONG)
def test_a_wrong_value_is_named_with_file_rule_and_what_came(reader, value, message):
    with pytest.raises(ValueError, match=rf"^file.json: `a` {message}"):
        getattr(Fields({"a": value}, source="file.json"), reader)("a")


def test_ranges_and_choices_are_told():
    fields = Fields({"a": 5, "b": {"c": 5}}, source="file.json")
    for call, message in {
        lambda: fields.number("a", at_least=0, at_most=2): "`a` must be from 0 to 2, got 5",
        lambda: fields.number("a", at_most=2): "`a` must be at most 2, got 5",
        lambda: fields.number("a", at_least=9): "`a` must be at least 9, got 5",
        lambda: fields.choice("a", (5.0, True)): "`a` must be one of 5.0, True, got 5",
        lambda: fields.nested("b").flag("c"): "`b`: `c` must be true or false, got 5",
    }.items():
        with pytest.raises(ValueError, match=f"file.json: {message}"):
            call()


def test_messages_stay_short_and_on_one_line():
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    for name, value in {"a": "x" * 10**6, "b": list(range(10**6)), "c": nested, "d": "a\nb", "e\n" * 500: 1}.items():
        with pytest.raises(ValueError, match=r"^file.json: `.*` must be true or false, got ") as error:
            Fields({name: value}, source="file.json").flag(name)
        assert len(str(error.value)) < 400
        assert "\n" not in str(error.value)
    # Python itself takes a list apart level by level, and cannot go that deep.
    while nested:
        nested = nested.pop()
