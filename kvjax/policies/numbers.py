"""Checks of a policy's numbers, stored as plain ones, so that equal policies are equal, hash alike and print alike."""

import math

import numpy as np

from kvjax.allocation import check_count


def store_count(policy: object, name: str, *, at_least: int, unit: str = "token") -> None:
    """Checks an integer field of a frozen policy, and stores it as an int.

    Raises:
        ValueError: it is not an integer (NumPy's are), or under `at_least`.
    """
    value = getattr(policy, name)
    check_count(name, value, at_least=at_least, unit=unit)
    object.__setattr__(policy, name, int(value))


def store_share(policy: object, name: str) -> None:
    """Checks a field of a frozen policy that is a number from 0 to 1, and stores it as a float.

    Raises:
        ValueError: it is no number (NumPy's are, booleans are not), not finite, or outside [0, 1].
    """
    value = getattr(policy, name)
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0.0 <= value <= 1.0:
        raise ValueError(f"`{name}` must be from 0 to 1, got {value!r}.")
    object.__setattr__(policy, name, float(value))
