"""The description of a saved cache: what its file says, each field checked."""

import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvjax.fields import Fields
from kvjax.files import read_json
from kvjax.saving.arrays import StoredArray

#: The version of what `save_cache` writes; no other is read.
FORMAT = 1
#: What must be the same in the model that a cache is restored for, beside its rotation and its weights.
SIZES = ("num_layers", "num_query_heads", "num_kv_heads", "head_dim", "vocab_size")
#: What is written of each layer's `LayerSpec`.
LAYER_FIELDS = ("kept", "slots", "max_length", "shared")
#: Largest description in bytes: a model of 1,000 layers of 100 KV heads takes a fifth of it.
_LIMIT = 8 * 1024 * 1024
_DTYPES = ("float32", "bfloat16", "float16", "float64")


class Description(NamedTuple):
    """What cache.json says, its form checked.

    Attributes:
        model: sizes and rotation of the model.
        weights: the digest of its weights.
        policy: the policy as data.
        room: the cache's.
        dtype: of its rows.
        layers: `kept`, `slots`, `max_length` and `shared` of each layer.
        arrays: of each layer those that it has, by the field of `LayerState`; first of all the next positions.
    """

    model: dict[str, Any]
    weights: str
    policy: Any
    room: int
    dtype: str
    layers: list[dict[str, Any]]
    arrays: list[StoredArray]


def read_description(file: pathlib.Path) -> Description:
    """What cache.json says.

    Raises:
        ValueError: another version, a field that is missing, unknown or cannot be, or that is not what was written.
    """
    fields = Fields(read_json(file, limit=_LIMIT), source=file)
    if "format" not in fields:
        raise ValueError(f"{fields.source} is of a kvjax whose format had no version yet: save the cache anew.")
    if fields.integer("format") != FORMAT:
        fields.fail("format", f"must be {FORMAT}, which this kvjax reads")
    names = ("format", "model", "policy", "room", "rows", "dtype", "layers", "arrays", "digest")
    _check_names(fields, names)
    model = fields.nested("model")
    _check_names(model, (*SIZES, "dtype", "rope", "weights"))
    sizes = {name: model.integer(name, at_least=1) for name in SIZES}
    rows, heads = fields.integer("rows", at_least=1), sizes["num_kv_heads"]
    layers = [_layer(layer, heads) for layer in _list_of_fields(fields, "layers", count=sizes["num_layers"])]
    dtype = fields.choice("dtype", _DTYPES)
    expected = list(_shapes(layers, rows=rows, width=2 * sizes["head_dim"], dtype=dtype))
    about = Description(
        model={**sizes, "dtype": model.text("dtype"), "rope": model.take("rope")},
        weights=model.text("weights"),
        policy=fields.take("policy"),
        room=fields.integer("room", at_least=1),
        dtype=dtype,
        layers=layers,
        arrays=_arrays(fields, expected),
    )
    if fields.text("digest") != digest_of({name: value for name, value in fields.values.items() if name != "digest"}):
        fields.fail("digest", "must be that of the other fields: something has changed since it was written")
    return about


def _check_names(fields: Fields, names: Iterable[str]) -> None:
    unknown = fields.values.keys() - set(names)
    if unknown:
        raise ValueError(f"{fields.source}: `{min(unknown)}` is no field of a saved cache.")


def _list_of_fields(fields: Fields, name: str, *, count: int | None = None) -> list[Fields]:
    values = fields.take(name)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        fields.fail(name, "must be a list of objects")
    if count is not None and len(values) != count:
        raise ValueError(f"{fields.source}: `{name}` must be of {count}, got {len(values)}.")
    return [Fields(value, source=f"{fields.source}: `{name}[{index}]`") for index, value in enumerate(values)]


def _layer(fields: Fields, heads: int) -> dict[str, Any]:
    _check_names(fields, LAYER_FIELDS)
    kept, slots = tuple(fields.integers("kept", at_least=1)), tuple(fields.integers("slots", at_least=1))
    for name, counts in (("kept", kept), ("slots", slots)):
        if len(counts) != heads:
            fields.fail(name, f"must have a number for each of the {heads} KV heads")
    if any(held > size for held, size in zip(kept, slots, strict=True)):
        fields.fail("kept", f"must not be over `slots`, {list(slots)}")
    most = fields.integer("max_length", at_least=1)
    return {"kept": kept, "slots": slots, "max_length": most, "shared": fields.flag("shared")}


class _Shape(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str
    optional: bool = False


def _shapes(layers: list[dict[str, Any]], *, rows: int, width: int, dtype: str) -> Iterator[_Shape]:
    """The arrays of a cache in the order of the file; whether there are scores is the policy's to say."""
    yield _Shape("next_position", (rows,), "int32")
    for layer, about in enumerate(layers):
        slots, heads = sum(about["slots"]), len(about["slots"])
        yield _Shape(f"{layer}.kv", (rows, slots, width), dtype)
        yield _Shape(f"{layer}.positions", (rows, slots), "int32")
        yield _Shape(f"{layer}.lengths", (rows, heads), "int32")
        yield _Shape(f"{layer}.scores", (rows, slots), "float32", optional=True)
        if about["shared"]:
            yield _Shape(f"{layer}.starts", (rows, heads), "int32")


def _arrays(fields: Fields, expected: list[_Shape]) -> list[StoredArray]:
    waiting, stored = list(expected), []
    for entry in _list_of_fields(fields, "arrays"):
        _check_names(entry, StoredArray._fields)
        name = entry.text("name")
        while waiting and waiting[0].optional and waiting[0].name != name:
            waiting.pop(0)
        if not waiting or waiting[0].name != name:
            entry.fail("name", f"must be '{waiting[0].name}'" if waiting else "must not be there")
        shape = waiting.pop(0)
        if tuple(entry.integers("shape")) != shape.shape:
            entry.fail("shape", f"must be {list(shape.shape)}")
        stored.append(StoredArray(name, shape.shape, entry.choice("dtype", (shape.dtype,)), entry.text("digest")))
    missing = [shape.name for shape in waiting if not shape.optional]
    if missing:
        raise ValueError(f"{fields.source}: `arrays` lacks '{missing[0]}'.")
    return stored


def digest_of(about: dict[str, Any]) -> str:
    """The digest of all fields of a description but its own."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
