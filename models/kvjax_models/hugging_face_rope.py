"""The RoPE fields of config.json: old style (`rope_theta`, `rope_scaling`) and new (`rope_parameters`)."""

from typing import Any

from kvjax.fields import Fields
from kvjax.rope import LinearScaling, Llama3Scaling, Rope
from kvjax_models.config import LARGEST_SIZES, LARGEST_THETA

#: Bounds of what positions or frequencies are divided by.
FACTOR_RANGE = (1.0, 1e6)

_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# RoPE type: the fields that it needs. Any other field is an error.
_FIELDS = {"default": (), "linear": ("factor",), "llama3": _LLAMA3_FIELDS}
_ALWAYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def rope_from_hugging_face(fields: Fields, *, head_dim: int) -> Rope:
    """Builds the rotary embedding that config.json describes.

    Raises:
        ValueError: a field is missing, wrong or not supported; the message names it and its value.
    """
    if head_dim % 2:
        raise ValueError(f"{fields.source}: `head_dim` must be even for RoPE, got {head_dim}.")
    parameters = _parameters(fields)
    kinds = {parameters.choice(name, tuple(_FIELDS), "default") for name in ("rope_type", "type") if name in parameters}
    if len(kinds) > 1:
        parameters.fail("type", f"contradicts the `rope_type` {parameters.take('rope_type')!r}")
    kind = kinds.pop() if kinds else "default"
    for name in parameters.values:
        if name in parameters and name not in (*_ALWAYS, *_FIELDS[kind]):
            parameters.fail(name, f"is not supported for {kind!r}")
    if parameters.number("partial_rotary_factor", 1.0) != 1:
        parameters.fail("partial_rotary_factor", "must be 1")
    scaling = _scaling(kind, parameters, original=fields.take("original_max_position_embeddings", None))
    return Rope(head_dim=head_dim, theta=_theta(fields, parameters), scaling=scaling)


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


def _parameters(fields: Fields) -> Fields:
    empty = Fields({}, source=fields.source)
    new, old = (fields.nested(name, empty) for name in ("rope_parameters", "rope_scaling"))
    if new.values and old.values and new.values != old.values:
        fields.fail("rope_scaling", "contradicts `rope_parameters`")
    return new if new.values else old


def _theta(fields: Fields, parameters: Fields) -> float:
    thetas = {}
    for place in (parameters, fields):
        if "rope_theta" in place:
            thetas[place] = place.number("rope_theta", at_most=LARGEST_THETA)
            if not thetas[place] > 1:
                place.fail("rope_theta", "must be a number above 1")
    if len(set(thetas.values())) > 1:
        fields.fail("rope_theta", f"contradicts the {thetas[parameters]!r} among RoPE's parameters")
    return next(iter(thetas.values()), 10000.0)


def _scaling(kind: str, parameters: Fields, *, original: Any) -> LinearScaling | Llama3Scaling | None:
    if kind == "default":
        return None
    smallest, largest = FACTOR_RANGE
    factor = parameters.number("factor", at_least=smallest, at_most=largest)
    if kind == "linear":
        return LinearScaling(factor=factor)
    low, high = (parameters.number(f"{end}_freq_factor", at_least=1e-3, at_most=largest) for end in ("low", "high"))
    if not high > low:
        parameters.fail("high_freq_factor", f"must exceed the `low_freq_factor` {low:g}")
    most = LARGEST_SIZES["max_position_embeddings"]
    positions = parameters.integer("original_max_position_embeddings", at_least=1, at_most=most)
    if original not in (None, positions):
        parameters.fail("original_max_position_embeddings", "contradicts the field of that name outside")
    return Llama3Scaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=positions)
