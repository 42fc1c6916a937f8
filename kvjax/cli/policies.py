"""Policies by name, with settings given as text."""

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

import kvjax
from kvjax.cli.errors import UserError

#: Name on the command line: class in kvjax.
POLICIES = {
    "full": "Full",
    "streaming-llm": "StreamingLLM",
    "snapkv": "SnapKV",
    "pyramidkv": "PyramidKV",
    "ada-kv": "AdaKV",
    "h2o": "H2O",
    "tova": "TOVA",
    "knorm": "Knorm",
    "expected-attention": "ExpectedAttention",
    "duo": "DuoAttention",
}

#: Classes whose values have names here.
_NAMED = {"Allocation": {"uniform": "Uniform", "pyramid": "Pyramid", "adaptive": "Adaptive"}}

_REQUIRED = {
    "budget": "a --budget: a number of tokens, or a fraction of the prompt such as 0.25",
}
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}


def make_policy(name: str, *, budget: int | float | None, settings: Sequence[str]) -> "kvjax.Policy":
    """The policy with its settings.

    Args:
        name: one of `POLICIES`.
        budget: tokens, or a fraction of the prompt; None where none is given.
        settings: each "NAME=VALUE".

    Raises:
        UserError: an unknown name, or a value that is not of the setting's type.
        ValueError: the policy's own objections.
    """
    if name not in POLICIES:
        raise UserError(f"--policy must be one of {', '.join(POLICIES)}; got {name!r}.")
    policy = getattr(kvjax, POLICIES[name])
    fields = {field.name: field for field in dataclasses.fields(policy) if field.init}
    given = dict(_setting(name, text, policy, fields) for text in settings)
    if budget is not None and "budget" not in fields:
        others = ", ".join(other for other in POLICIES if _takes_budget(other))
        why = ": it keeps every token" if name == "full" else ""
        raise UserError(f"--policy {name} takes no --budget{why}; these do: {others}.")
    if budget is not None:
        given["budget"] = budget
    for field in fields.values():
        if field.default is dataclasses.MISSING and field.name not in given:
            raise UserError(f"--policy {name} needs {_REQUIRED.get(field.name, f'--set {field.name}=...')}.")
    return policy(**given)


def _takes_budget(name: str) -> bool:
    return any(field.name == "budget" for field in dataclasses.fields(getattr(kvjax, POLICIES[name])))


def _setting(policy_name: str, text: str, policy: type, fields: dict[str, Any]) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set must be NAME=VALUE, got {text!r}.")
    if name == "budget":
        raise UserError("--set is for a policy's other settings; give the budget with --budget.")
    if name not in fields:
        valid = ", ".join(field for field in fields if field != "budget")
        has = f"its settings are {valid}" if valid else "it has none"
        raise UserError(f"--policy {policy_name} has no setting {name!r}; {has}.")
    return name, _parsed(value, typing.get_type_hints(policy)[name], name=name)


def _parsed(text: str, annotation: Any, *, name: str) -> Any:
    """The value that `text` stands for in a field annotated so."""
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    kinds = typing.get_args(annotation) if union else (annotation,)
    if kvjax.HeadPattern in kinds:
        return kvjax.HeadPattern.load(text)
    # "none" is no text where a setting may be None.
    kinds = sorted(kinds, key=lambda kind: kind is not types.NoneType)
    for kind in kinds:
        try:
            return _parsed_as(kind, text)
        except ValueError:
            continue
    raise UserError(f"--set {name} must be {' or '.join(_described(kind) for kind in kinds)}, got {text!r}.")


def _parsed_as(kind: Any, text: str) -> Any:
    if kind in (int, float, str):
        return kind(text)
    choices: dict[str, Any] = {}
    if kind is bool:
        choices = {"true": True, "false": False}
    elif kind is types.NoneType:
        choices = {"none": None}
    elif typing.get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in typing.get_args(kind)}
    elif _class_name(kind) in _NAMED:
        choices = {name: getattr(kvjax, made)() for name, made in _NAMED[_class_name(kind)].items()}
    if text not in choices:
        raise ValueError(text)
    return choices[text]


def _described(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(str(choice) for choice in typing.get_args(kind))
    if _class_name(kind) in _NAMED:
        return " or ".join(_NAMED[_class_name(kind)])
    return _WORDS.get(kind, f"a {kind}, which only Python can give")


def _class_name(kind: Any) -> str:
    return getattr(kind, "__name__", "")
