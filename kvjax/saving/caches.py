"""Caches on disk: saved, restored, and continued bit for bit."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from kvjax.files import check_free, new_folder, reading, write_json
from kvjax.model import Model, check_model
from kvjax.policies.base import Policy
from kvjax.prompts import check_policy
from kvjax.saving.arrays import read_arrays, write_arrays
from kvjax.saving.description import FORMAT, LAYER_FIELDS, SIZES, Description, digest_of, read_description
from kvjax.saving.model_digest import model_digest
from kvjax.saving.settings import as_data, policy_from_data, rotation_data, same_rotation, shown
from kvjax.state import EMPTY, Cache, LayerSpec, LayerState, ModelSpec, for_platform, whole_rows
from kvjax.steps import dtype_name

_ARRAYS, _ABOUT = "arrays.bin", "cache.json"


def save_cache(path: str | pathlib.Path, cache: Cache, params: Model) -> None:
    """Writes a cache into a new folder, whole or not at all.

    cache.json tells what the cache belongs to, and has digests of the model's weights, of every array and of itself;
    arrays.bin has the arrays. The host's memory holds one of them at a time.

    Args:
        path: the folder.
        cache: what is remembered; it stays as it is.
        params: the model that it belongs to.

    Raises:
        ValueError: `path` holds something already, `cache` is none or of another model, or its policy has settings
            that are no numbers, texts, tuples or dataclasses.
        OSError: it cannot be written; nothing is left of it then.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"`cache` must be a kvjax.Cache, got {type(cache).__name__}.")
    model = check_model(params)
    check_free(path, argument="path")
    _check_model(_model_data(cache.model), model.spec, whose="`cache` is of")
    about = {
        "format": FORMAT,
        "model": {**_model_data(model.spec), "weights": model_digest(model)},
        "policy": as_data(cache.policy, what="`policy`"),
        "room": int(cache.room),
        "rows": cache.next_position.shape[0],
        "dtype": cache.specs[0].dtype,
        "layers": [
            {name: as_data(getattr(spec, name), what=f"`{name}`") for name in LAYER_FIELDS} for spec in cache.specs
        ],
    }
    with new_folder(path, argument="path") as folder:
        about["arrays"] = [stored._asdict() for stored in write_arrays(folder / _ARRAYS, _named(cache))]
        write_json(folder / _ABOUT, about | {"digest": digest_of(about)})


def restore_cache(
    path: str | pathlib.Path, params: Model, *, policy: Policy | None = None, cache_dtype: Any = None
) -> Cache:
    """Reads a cache that `save_cache` wrote.

    Args:
        path: the folder.
        params: the model that it belongs to: the same weights and position embedding; stop tokens may be others.
        policy: the policy that kept it. For one of kvjax's own it is a check, and may be left out. One of your own
            must be given, with the same settings: no code is ever looked up because a file names it.
        cache_dtype: what its rows are expected to be; the dtype that they were saved in by default.

    Raises:
        ValueError: no such cache, a damaged one, one of another model, policy or dtype, or of another version of
            the format.
    """
    model = check_model(params)
    asked = None if policy is None else check_policy(policy)
    dtype = dtype_name(cache_dtype)
    folder = pathlib.Path(path).absolute()
    file = folder / _ABOUT
    if not file.exists():
        raise ValueError(f"`path` must be a folder that `kvjax.save_cache` wrote, got {folder} ({_ABOUT} is missing).")
    with reading(file, what="a saved cache"):
        about = read_description(file)
        kept_by = _policy(about.policy, asked, file)
    _check_model(about.model, model.spec, whose=f"{file} was saved with")
    if about.weights != model_digest(model):
        raise ValueError(f"{file} was saved with another model: its sizes are the same, its weights are not.")
    if dtype is not None and dtype != about.dtype:
        raise ValueError(f"{file} was saved with another dtype: {about.dtype}, not {dtype}.")
    specs = tuple(
        LayerSpec(model=model.spec, layer=layer, dtype=about.dtype, **fields)
        for layer, fields in enumerate(about.layers)
    )
    return _assembled(about, specs, kept_by, folder / _ARRAYS)


def _policy(data: Any, asked: Policy | None, file: pathlib.Path) -> Policy:
    made = policy_from_data(data)
    if asked is None:
        if made is None:
            raise ValueError(
                f"{file} was saved with a policy that is not kvjax's own, {shown(data, None)}: give it as `policy`."
            )
        return made
    theirs = as_data(asked, what="`policy`")
    if theirs != data:
        raise ValueError(f"{file} was saved with another policy: {shown(data, theirs)}, not {shown(theirs, data)}.")
    return asked


def _model_data(spec: ModelSpec) -> dict[str, Any]:
    """What a cache's meaning depends on; its stop tokens and trained positions are not among it."""
    sizes = {name: int(getattr(spec, name)) for name in SIZES}
    return {**sizes, "dtype": spec.dtype, "rope": rotation_data(spec.rope, head_dim=spec.head_dim)}


def _check_model(data: dict[str, Any], spec: ModelSpec, *, whose: str) -> None:
    for name, value in _model_data(spec).items():
        if not (same_rotation(data[name], value) if name == "rope" else data[name] == value):
            raise ValueError(
                f"{whose} another model: `{name}` is {shown(data[name], value)}, not {shown(value, data[name])}."
            )


def _named(cache: Cache) -> Iterator[tuple[str, jax.Array]]:
    """The arrays in the order of `_shapes`; whole rows, which every platform can read."""
    yield "next_position", cache.next_position
    for layer, (state, spec) in enumerate(zip(cache.layers, cache.specs, strict=True)):
        for field, array in state._replace(kv=whole_rows(state, spec))._asdict().items():
            if array is not None:
                yield f"{layer}.{field}", array


def _assembled(about: Description, specs: tuple[LayerSpec, ...], policy: Policy, file: pathlib.Path) -> Cache:
    """The cache of the arrays in a file; each layer is laid out for the platform as soon as it is read."""
    device = jax.local_devices()[0]
    names = [stored.name for stored in about.arrays]
    arrays = read_arrays(file, about.arrays)
    next_position = jax.device_put(next(arrays), device, may_alias=False)
    placed, layers = for_platform(specs, None), []
    for layer, (spec, new) in enumerate(zip(specs, placed, strict=True)):
        fields = [name.removeprefix(f"{layer}.") for name in names if name.startswith(f"{layer}.")]
        read = dict(zip(fields, arrays, strict=False))
        _check_slots(read, spec, file)
        state = LayerState(**{field: jax.device_put(array, device, may_alias=False) for field, array in read.items()})
        alone = Cache((state,), next_position, policy=policy, specs=(spec,), room=about.room)
        layers += alone.laid_out((new,)).layers
    return Cache(tuple(layers), next_position, policy=policy, specs=placed, room=about.room)


def _check_slots(arrays: dict[str, np.ndarray], spec: LayerSpec, file: pathlib.Path) -> None:
    """Raises a ValueError if what the arrays say of slots would have a kernel read others."""
    slots = arrays["positions"].shape[1]
    starts = np.asarray(arrays.get("starts", np.broadcast_to(spec.starts, arrays["lengths"].shape)), np.int64)
    ends = np.append(starts[:, 1:], np.full_like(starts[:, :1], slots), axis=1)
    if (starts < 0).any() or (ends < starts).any():
        raise ValueError(f"{file}: `{spec.layer}.starts` must rise from 0 to at most {slots}.")
    if (arrays["lengths"] < 0).any() or (arrays["lengths"] > ends - starts).any():
        raise ValueError(f"{file}: `{spec.layer}.lengths` must be from 0 to each head's slots.")
    if (arrays["positions"] < EMPTY).any():
        raise ValueError(f"{file}: `{spec.layer}.positions` must be {EMPTY} or more.")
