"""The RoPE fields of config.json: old style (`rope_theta`, `rope_scaling`) and new (`rope_parameters`)."""

from collections.abc import Mapping
from typing import Any

from kvjax.rope import LinearScaling, Llama3Scaling, Rope

_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# RoPE type: the fields that it needs. Any other field is an error.
_FIELDS = {"default": (), "linear": ("factor",), "llama3": _LLAMA3_FIELDS}


def rope_from_hugging_face(fields: Mapping[str, Any], *, head_dim: int) -> Rope:
    """Builds the rotary embedding that config.json describes.

    Raises:
        ValueError: a field is missing, wrong or not supported; the message names it and its value.
    """
    style, parameters = _parameters(fields)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _FIELDS:
        raise ValueError(f"`{style}` must have a rope_type of {list(_FIELDS)}, got {kind!r}: {parameters!r}.")
    _check_fields(style, parameters, kind=kind)
    theta = parameters.get("rope_theta", fields.get("rope_theta", 10000.0))
    if "rope_theta" in parameters and fields.get("rope_theta", theta) != theta:
        raise ValueError(f"`rope_theta` is {fields['rope_theta']!r}, but `{style}` says {theta!r}.")
    if not isinstance(theta, int | float) or not theta > 1:
        raise ValueError(f"`rope_theta` must be a number above 1, got {theta!r}.")
    return Rope(head_dim=head_dim, theta=float(theta), scaling=_scaling(kind, parameters))


def rope_fields(rope: Rope) -> dict[str, Any]:
    """The `rope_parameters` that `rope_from_hugging_face` reads back as `rope`."""
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if isinstance(rope.scaling, LinearScaling):
        fields |= {"rope_type": "linear", "factor": rope.scaling.factor}
    elif isinstance(rope.scaling, Llama3Scaling):
        fields |= {
            "rope_type": "llama3",
            "factor": rope.scaling.factor,
            "low_freq_factor": rope.scaling.low_freq_factor,
            "high_freq_factor": rope.scaling.high_freq_factor,
            "original_max_position_embeddings": rope.scaling.original_max_positions,
        }
    elif rope.scaling is not None:
        raise ValueError(f"`rope.scaling` must be linear or llama3 to be written, got {rope.scaling!r}.")
    return fields


def _parameters(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    styles = [name for name in ("rope_parameters", "rope_scaling") if fields.get(name)]
    if len(styles) == 2 and fields["rope_parameters"] != fields["rope_scaling"]:
        raise ValueError(
            f"`rope_scaling` is {fields['rope_scaling']!r}, but `rope_parameters` says {fields['rope_parameters']!r}."
        )
    style = styles[0] if styles else "rope_scaling"
    parameters = fields.get(style) or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"`{style}` must be an object, got {parameters!r}.")
    return style, parameters


def _check_fields(style: str, parameters: Mapping[str, Any], *, kind: str) -> None:
    if parameters.get("partial_rotary_factor", 1) != 1:
        got = parameters["partial_rotary_factor"]
        raise ValueError(f"`partial_rotary_factor` in `{style}` must be 1, got {got!r}: not supported.")
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_FIELDS[kind]}
    for name in parameters:
        if name not in known:
            raise ValueError(f"`{name}` in `{style}` is not supported for {kind!r}, got {parameters[name]!r}.")
    for name in _FIELDS[kind]:
        value = parameters.get(name)
        if not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"`{name}` in `{style}` must be a positive number for {kind!r}, got {value!r}.")


def _scaling(kind: str, parameters: Mapping[str, Any]) -> LinearScaling | Llama3Scaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=float(parameters["factor"]))
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if not high > low:
        raise ValueError(f"`high_freq_factor` must exceed `low_freq_factor`, got {high!r} and {low!r}.")
    return Llama3Scaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(low),
        high_freq_factor=float(high),
        original_max_positions=int(parameters["original_max_position_embeddings"]),
    )
