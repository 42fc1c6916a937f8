"""Policies and rotations as data: what a file can hold, compare, and give back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax.policies as kinds
from kvjax.allocation import Adaptive, Pyramid, Uniform
from kvjax.head_pattern import HeadPattern
from kvjax.policies import Policy
from kvjax.rope import Rotation

#: What a file may name to be made anew. Nothing else is ever looked up because a file names it.
_KNOWN: Mapping[str, type] = {
    f"kvjax.{kind.__name__}": kind
    for kind in (*map(vars(kinds).get, kinds.__all__), Uniform, Pyramid, Adaptive, HeadPattern)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
_NAMES = {kind: name for name, kind in _KNOWN.items()}

#: Where a rotation that is no data is tried out; far enough that bases which differ by a ten-thousandth differ.
_POSITIONS = (1, 30, 1000, 30000)
#: Platforms compute the cosines of such angles this far apart.
_TOLERANCE = 1e-2


def as_data(value: object, *, what: str) -> Any:
    """A setting as JSON has it: a NumPy number as Python's, a dataclass as its class's name and its fields.

    Args:
        value: None, a number, a text, a tuple, or a dataclass of such.
        what: the setting, for messages.

    Raises:
        ValueError: it is something else, or holds it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [as_data(item, what=what) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        name = _NAMES.get(type(value), type(value).__qualname__)
        return {
            "class": name,
            "fields": {field: as_data(item, what=f"{what}: `{field}` of {name}") for field, item in fields.items()},
        }
    raise ValueError(
        f"{what} must be a number, a text, a tuple or a dataclass of such to be saved, got {type(value).__name__}."
    )


def policy_from_data(data: Any) -> Policy | None:
    """The policy that `as_data` gave; None where it, or something in it, is not kvjax's own.

    Raises:
        ValueError: it is no policy, or one whose settings cannot be.
    """
    if not _all_known(data):
        return None
    policy = _made(data)
    if not isinstance(policy, Policy) or as_data(policy, what="policy") != data:
        raise ValueError("`policy` is no policy with all its settings.")
    return policy


def _all_known(data: Any) -> bool:
    if isinstance(data, list):
        return all(map(_all_known, data))
    if isinstance(data, dict):
        return all(map(_all_known, _fields(data).values())) and data["class"] in _KNOWN
    return True


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    fields = data.get("fields")
    if set(data) != {"class", "fields"} or not isinstance(fields, dict) or not isinstance(data["class"], str):
        raise ValueError("`policy` must have the name of its `class` and its `fields`, and nothing else.")
    return fields


def _made(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_made, data))
    if not isinstance(data, dict):
        return data
    kind, fields = _KNOWN[data["class"]], {name: _made(value) for name, value in _fields(data).items()}
    unknown = fields.keys() - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"`policy`: {data['class']} has no setting {min(unknown)!r}.")
    return kind(**fields)


def rotation_data(rope: Rotation, *, head_dim: int) -> Any:
    """What tells position embeddings apart: their settings, or where there are none, what they do to some numbers.

    Args:
        rope: the embedding; one that is no dataclass of numbers and texts may be any object.
        head_dim: D.
    """
    if dataclasses.is_dataclass(rope):
        try:
            return as_data(rope, what="`rope`")
        except ValueError:
            pass
    x = jnp.cos(jnp.arange(head_dim, dtype=jnp.float32))
    x = jnp.broadcast_to(x[None, None, None], (1, len(_POSITIONS), 1, head_dim))
    rotated = rope.rotate(x, jnp.asarray([_POSITIONS], jnp.int32))
    return {"rotated": np.round(np.asarray(rotated, np.float64), 4).ravel().tolist()}


def same_rotation(data: Any, other: Any) -> bool:
    """Whether two embeddings are the same, by their `rotation_data`."""
    if not (isinstance(data, dict) and isinstance(other, dict) and "rotated" in data and "rotated" in other):
        return data == other
    try:
        first, second = (np.asarray(x["rotated"], np.float64) for x in (data, other))
    except (TypeError, ValueError, OverflowError):
        return False
    return first.shape == second.shape and bool(np.allclose(first, second, rtol=0.0, atol=_TOLERANCE))


def shown(data: Any, other: Any) -> str:
    """Settings as one would write them, those alone that differ from another's where the classes are the same."""
    if not isinstance(data, dict) or "class" not in data:
        text = repr(data)
        return text if len(text) <= 100 else f"{text[:97]}..."
    name, fields = str(data["class"]).removeprefix("kvjax."), _fields(data)
    theirs = _fields(other) if isinstance(other, dict) and other.get("class") == data["class"] else {}
    different = {field: value for field, value in fields.items() if field not in theirs or theirs[field] != value}
    return f"{name}({', '.join(f'{key}={shown(value, theirs.get(key))}' for key, value in different.items())})"
