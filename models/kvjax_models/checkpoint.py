"""Orbax checkpoints: the parameters, with config.json and the tokenizer's files beside them."""

import collections
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike

from kvjax.extras import extra
from kvjax.fields import shown
from kvjax.files import new_folder, reading, write_json
from kvjax_models.config import LlamaConfig
from kvjax_models.hugging_face_config import CONFIG_FILE, config_to_hugging_face
from kvjax_models.llama import Llama
from kvjax_models.tokenizer import Tokenizer
from kvjax_models.tokenizer_files import save_tokenizer
from kvjax_models.weights import (
    ParameterPath,
    check_finite,
    check_layers,
    llama_with,
    parameter_shapes,
    parameters,
)

#: The folder within a checkpoint that Orbax writes.
WEIGHTS_FOLDER = "orbax"


def save_checkpoint(path: pathlib.Path, model: Llama, tokenizer: Tokenizer | None) -> None:
    """Writes a checkpoint that `load` reads, whole or not at all.

    Raises:
        FileExistsError: `path` holds something already.
    """
    path = path.absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"`path` must be a new or empty folder, got {path}, which holds something.")
    config = config_to_hugging_face(model.config)
    checkpointer = _checkpointer()
    with new_folder(path, argument="path") as part:
        with checkpointer:
            checkpointer.save(part / WEIGHTS_FOLDER, {_key(p): array for p, array in parameters(model).items()})
        write_json(part / CONFIG_FILE, config)
        if tokenizer is not None:
            save_tokenizer(tokenizer, part)


def load_checkpoint(path: pathlib.Path, config: LlamaConfig, dtype: DTypeLike | None) -> Llama:
    """Reads the parameters that `save_checkpoint` wrote.

    Args:
        path: the checkpoint.
        config: what its config.json says.
        dtype: of every parameter; None for the one that they were saved in.

    Raises:
        ValueError: parameters are missing, surplus, misshapen, damaged, or (where they are on a CPU) not finite.
    """
    folder = path.absolute() / WEIGHTS_FOLDER
    with _checkpointer() as checkpointer, reading(folder, what="a whole Orbax checkpoint"):
        stored = _described(checkpointer, folder)
        saved = stored.get("embedding")
        dtype = jnp.dtype(dtype if dtype is not None else saved.dtype if saved is not None else jnp.float32)
        shapes = _checked_shapes(stored, config, dtype, folder=folder)
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = {_key(p): jax.ShapeDtypeStruct(shape.shape, dtype, sharding=place) for p, shape in shapes.items()}
        arrays = checkpointer.restore(folder, wanted)
    for name, array in arrays.items():
        # From an accelerator's memory every byte would come back for this.
        if array.device.platform == "cpu":
            check_finite(np.asarray(array), name=name, file=folder)
    return llama_with(config, {p: arrays[_key(p)] for p in shapes}, dtype=dtype)


def stored_dtypes(path: pathlib.Path, config: LlamaConfig) -> Mapping[str, int]:
    """How many parameters `save_checkpoint` wrote in each dtype.

    Raises:
        ValueError: parameters are missing, surplus or misshapen.
    """
    folder = path.absolute() / WEIGHTS_FOLDER
    with _checkpointer() as checkpointer, reading(folder, what="a whole Orbax checkpoint"):
        stored = _described(checkpointer, folder)
        _checked_shapes(stored, config, jnp.float32, folder=folder)
        return collections.Counter(str(array.dtype) for array in stored.values())


def _described(checkpointer: Any, folder: pathlib.Path) -> dict[str, Any]:
    """What Orbax knows of each array without reading it."""
    for file in _files(folder):
        # Orbax would wait for a named pipe.
        if not file.is_file() and not file.is_dir():
            raise ValueError(f"{file} is no regular file.")
    described = checkpointer.metadata(folder).item_metadata
    if described is None or not isinstance(described.tree, dict):
        raise ValueError("what describes its arrays is missing.")
    for name, array in described.tree.items():
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"{shown(name)} is no array.")
    return described.tree


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    for place, _, names in folder.walk():
        for name in names:
            yield place / name


def _checkpointer() -> Any:
    with extra("orbax", purpose="Reading or writing an Orbax checkpoint"):
        import orbax.checkpoint
    return orbax.checkpoint.StandardCheckpointer()


def _key(path: ParameterPath) -> str:
    return ".".join(str(part) for part in path)


def _checked_shapes(
    stored: Mapping[str, Any], config: LlamaConfig, dtype: DTypeLike, *, folder: pathlib.Path
) -> dict[ParameterPath, jax.ShapeDtypeStruct]:
    """Every parameter's shape, which is the stored one's."""
    check_layers(config, len(stored), source=folder)
    shapes = parameter_shapes(config, dtype=dtype)
    for path, expected in shapes.items():
        name = _key(path)
        if name not in stored:
            raise ValueError(f"{folder} lacks the tensor {name!r}, which its config.json asks for.")
        shape = tuple(stored[name].shape)
        if shape != expected.shape:
            raise ValueError(f"{folder}: the tensor {name!r} must be {expected.shape} by its config.json, got {shape}.")
    surplus = sorted(stored.keys() - {_key(path) for path in shapes})
    if surplus:
        raise ValueError(f"{folder} holds the tensor {shown(surplus[0])}, which its config.json has no place for.")
    return shapes
