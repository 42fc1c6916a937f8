"""Caches on disk: saved with Orbax, restored, and continued bit for bit."""

import dataclasses
import json
import pathlib
from typing import Any

import jax

from kvjax.extras import extra
from kvjax.model import Model, check_model
from kvjax.policies.base import Policy
from kvjax.prompts import check_policy
from kvjax.state import Cache, LayerSpec, LayerState

_ARRAYS, _ABOUT = "arrays", "cache.json"


def save_cache(path: str | pathlib.Path, cache: Cache) -> None:
    """Writes a cache into a new folder.

    Args:
        path: the folder.
        cache: what is remembered; it stays as it is.

    Raises:
        ValueError: `path` holds something already, or `cache` is none.
    """
    if not isinstance(cache, Cache):
        raise ValueError(f"`cache` must be a kvjax.Cache, got {type(cache).__name__}.")
    # Whole rows, which every platform can read.
    cache = cache.laid_out(tuple(dataclasses.replace(spec, split=False) for spec in cache.specs))
    folder = pathlib.Path(path).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"`path` must be a new or empty folder, got {folder}, which holds something.")
    with _checkpointer() as checkpointer:
        checkpointer.save(folder / _ARRAYS, _named(cache))
    (folder / _ABOUT).write_text(json.dumps(_about(cache), indent=1) + "\n", encoding="utf-8")


def restore_cache(path: str | pathlib.Path, params: Model, *, policy: Policy, cache_dtype: Any = None) -> Cache:
    """Reads a cache that `save_cache` wrote.

    Args:
        path: the folder.
        params: the model that it belongs to.
        policy: the policy that kept it, with the same settings.
        cache_dtype: what its rows are expected to be; the dtype that they were saved in by default.

    Raises:
        ValueError: no such cache, a damaged one, or one of another model, policy or dtype.
    """
    model, policy = check_model(params), check_policy(policy)
    folder = pathlib.Path(path).absolute()
    try:
        about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
        room, dtype, shapes = about["room"], about["dtype"], about["specs"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"`path` must be a folder that `kvjax.save_cache` wrote, got {folder} ({error}).") from error
    asked = {"model": repr(model.spec), "policy": repr(policy)}
    if cache_dtype is not None:
        asked["dtype"] = jax.numpy.dtype(cache_dtype).name
    for what, value in asked.items():
        if about[what] != value:
            raise ValueError(f"{folder} was saved with another {what}: {about[what]}, not {value}.")
    specs = tuple(
        LayerSpec(model=model.spec, layer=layer, kept=tuple(kept), slots=tuple(slots), dtype=dtype, **rest)
        for layer, (kept, slots, rest) in enumerate(shapes)
    )
    arrays = {name: jax.ShapeDtypeStruct(tuple(shape), kind) for name, (shape, kind) in about["arrays"].items()}
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in arrays.items()}
    with _checkpointer() as checkpointer:
        try:
            arrays = checkpointer.restore(folder / _ARRAYS, wanted)
        except Exception as error:  # Orbax and its storage raise errors of many kinds.
            raise ValueError(f"{folder} is not a whole cache: {error}") from error
    layers = tuple(
        LayerState(**{field: arrays.get(f"{layer}.{field}") for field in LayerState._fields})
        for layer in range(len(specs))
    )
    return Cache(layers, arrays["next_position"], policy=policy, specs=specs, room=room).using(None)


def _about(cache: Cache) -> dict[str, Any]:
    """What must be the same for the arrays to make sense, and what gives their shapes."""
    return {
        "model": repr(cache.model),
        "policy": repr(cache.policy),
        "dtype": cache.specs[0].dtype,
        "room": cache.room,
        "specs": [(s.kept, s.slots, {"max_length": s.max_length, "shared": s.shared}) for s in cache.specs],
        "arrays": {name: (x.shape, x.dtype.name) for name, x in _named(cache).items()},
    }


def _named(cache: Cache) -> dict[str, jax.Array]:
    arrays = {"next_position": cache.next_position}
    for layer, state in enumerate(cache.layers):
        arrays.update({f"{layer}.{field}": x for field, x in state._asdict().items() if x is not None})
    return arrays


def _checkpointer() -> Any:
    with extra("orbax", purpose="Saving or restoring a cache"):
        import orbax.checkpoint
    return orbax.checkpoint.StandardCheckpointer()
