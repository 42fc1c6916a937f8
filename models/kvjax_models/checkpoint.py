"""Orbax checkpoints: the parameters, with config.json and the tokenizer's files beside them."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from kvjax.extras import extra
from kvjax.files import new_folder
from kvjax_models.config import LlamaConfig
from kvjax_models.hugging_face_config import config_to_hugging_face
from kvjax_models.llama import Llama
from kvjax_models.tokenizer import Tokenizer
from kvjax_models.tokenizer_files import save_tokenizer
from kvjax_models.weights import ParameterPath, llama_with, parameter_shapes, parameters

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
    config = json.dumps(config_to_hugging_face(model.config), indent=2)
    with new_folder(path, argument="path") as part:
        with _checkpointer() as checkpointer:
            checkpointer.save(part / WEIGHTS_FOLDER, {_key(p): array for p, array in parameters(model).items()})
        (part / "config.json").write_text(config, encoding="utf-8")
        if tokenizer is not None:
            save_tokenizer(tokenizer, part)


def load_checkpoint(path: pathlib.Path, config: LlamaConfig, dtype: DTypeLike | None) -> Llama:
    """Reads the parameters that `save_checkpoint` wrote.

    Args:
        path: the checkpoint.
        config: what its config.json says.
        dtype: of every parameter; None for the one that they were saved in.

    Raises:
        ValueError: parameters are missing, surplus, misshapen or damaged.
    """
    folder = path.absolute() / WEIGHTS_FOLDER
    with _checkpointer() as checkpointer:
        try:
            described = checkpointer.metadata(folder).item_metadata
        except Exception as error:  # Orbax and its storage raise errors of many kinds.
            raise ValueError(f"{folder} is not a whole Orbax checkpoint: {error}") from error
        if described is None:
            raise ValueError(f"{folder} is not a whole Orbax checkpoint: what describes its arrays is missing.")
        stored = described.tree
        saved = stored.get("embedding")
        dtype = jnp.dtype(dtype if dtype is not None else saved.dtype if saved is not None else jnp.float32)
        shapes = parameter_shapes(config, dtype=dtype)
        _check(stored, shapes, folder=folder)
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = {_key(p): jax.ShapeDtypeStruct(shape.shape, dtype, sharding=place) for p, shape in shapes.items()}
        try:
            arrays = checkpointer.restore(folder, wanted)
        except Exception as error:
            raise ValueError(f"{folder} is not a whole Orbax checkpoint: {error}") from error
    return llama_with(config, {p: arrays[_key(p)] for p in shapes}, dtype=dtype)


def _checkpointer() -> Any:
    with extra("orbax", purpose="Reading or writing an Orbax checkpoint"):
        import orbax.checkpoint
    return orbax.checkpoint.StandardCheckpointer()


def _key(path: ParameterPath) -> str:
    return ".".join(str(part) for part in path)


def _check(stored: dict[str, Any], shapes: dict[ParameterPath, jax.ShapeDtypeStruct], *, folder: pathlib.Path) -> None:
    expected = {_key(path): shape.shape for path, shape in shapes.items()}
    for name, shape in expected.items():
        if name not in stored:
            raise ValueError(f"{folder} lacks the tensor {name!r}, which its config.json asks for.")
        if tuple(stored[name].shape) != shape:
            raise ValueError(
                f"{folder}: the tensor {name!r} must be {shape} by its config.json, got {tuple(stored[name].shape)}."
            )
    surplus = sorted(stored.keys() - expected.keys())
    if surplus:
        raise ValueError(f"{folder} holds the tensor {surplus[0]!r}, which its config.json has no place for.")
