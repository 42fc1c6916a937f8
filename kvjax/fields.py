"""Values of a file that others made, each checked when it is taken.

Hand-written, since a validating library's messages leave out what came, and the fields of a checkpoint depend on
each other and on its format: msgspec, the lightest, would add 45 ms to a start and a compiled package to the core.
"""

import math
import reprlib
from collections.abc import Mapping
from typing import Any, Final, NoReturn

_REQUIRED: Final = object()

#: Largest size of anything in a file: tensors and contexts of more do not exist.
LARGEST = 1 << 40

#: Shows values of foreign files: neither long ones nor nested ones make a long message, or a slow one.
_SHORT = reprlib.Repr(maxlevel=3, maxlist=8, maxdict=8, maxstring=100, maxlong=60, maxother=100)


def shown(value: Any) -> str:
    """The beginning of a value from a foreign file, on one line, for a message."""
    text = _SHORT.repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


class Fields:
    """The fields of a JSON object or of a GGUF header.

    Every method raises a ValueError that names the file, the field, the rule and what came. A field that is absent
    or null has its default, where the method was given one.

    Args:
        values: by name.
        source: the file that they come from, for messages.
        prefix: of every name, such as "llama." in GGUF; part of the name in messages.
    """

    def __init__(self, values: Mapping[str, Any], *, source: object, prefix: str = ""):
        self.values = values
        self.source = source
        self.prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self.values.get(self.prefix + name) is not None

    def named(self, name: str) -> str:
        """The file and the field, to begin a message with."""
        # A foreign name may be long, or hold what no terminal shows.
        return f"{self.source}: `{self.prefix}{name if name.isidentifier() else shown(name)[1:-1]}`"

    def fail(self, name: str, rule: str, got: Any = _REQUIRED) -> NoReturn:
        """Raises the ValueError that a field breaks a rule: "must be an integer".

        Args:
            name: the field.
            rule: what it breaks.
            got: what came, where that is not the whole value.
        """
        got = self.values.get(self.prefix + name) if got is _REQUIRED else got
        raise ValueError(f"{self.named(name)} {rule}, got {shown(got)}.")

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """A value of any type."""
        value = self.values.get(self.prefix + name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.named(name)} is missing.")
        return default

    def integer(self, name: str, default: Any = _REQUIRED, *, at_least: int = 0, at_most: int = LARGEST) -> Any:
        """An integer in a range."""
        value = self.take(name, default)
        if value is default:
            return value
        if type(value) is not int:
            self.fail(name, "must be an integer")
        if not at_least <= value <= at_most:
            self.fail(name, f"must be from {at_least} to {at_most}")
        return value

    def number(
        self, name: str, default: Any = _REQUIRED, *, at_least: float = -math.inf, at_most: float = math.inf
    ) -> Any:
        """A finite number in a range, as a float."""
        value = self.take(name, default)
        if value is default:
            return value
        if type(value) not in (int, float):
            self.fail(name, "must be a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            self.fail(name, "must be finite")
        if not at_least <= value <= at_most:
            bounds = f"from {at_least:g} to {at_most:g}" if at_least > -math.inf else f"at most {at_most:g}"
            self.fail(name, f"must be {bounds if at_most < math.inf else f'at least {at_least:g}'}")
        return value

    def flag(self, name: str, default: Any = _REQUIRED) -> Any:
        """True or false."""
        value = self.take(name, default)
        if value is not default and not isinstance(value, bool):
            self.fail(name, "must be true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        value = self.take(name, default)
        if value is not default and not isinstance(value, str):
            self.fail(name, "must be a string")
        return value

    def choice(self, name: str, choices: tuple[Any, ...], default: Any = _REQUIRED) -> Any:
        """One of some values."""
        value = self.take(name, default)
        # `1 in (True,)` holds in Python.
        if value is not default and not any(value == choice and type(value) is type(choice) for choice in choices):
            self.fail(name, f"must be one of {', '.join(map(repr, choices))}")
        return value

    def integers(self, name: str, default: Any = _REQUIRED, *, at_least: int = 0, at_most: int = LARGEST) -> Any:
        """A list of integers in a range."""
        value = self.take(name, default)
        if value is default:
            return value
        if not isinstance(value, list) or any(type(x) is not int or not at_least <= x <= at_most for x in value):
            self.fail(name, f"must be a list of integers from {at_least} to {at_most}")
        return value

    def texts(self, name: str, default: Any = _REQUIRED) -> Any:
        """A list of strings."""
        value = self.take(name, default)
        if value is not default and (not isinstance(value, list) or any(not isinstance(x, str) for x in value)):
            self.fail(name, "must be a list of strings")
        return value

    def nested(self, name: str, default: Any = _REQUIRED) -> Any:
        """The fields of a nested object."""
        value = self.take(name, default)
        if value is default:
            return value
        if not isinstance(value, dict):
            self.fail(name, "must be an object")
        return Fields(value, source=self.named(name))
