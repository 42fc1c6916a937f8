"""`load` and `save`: checkpoints in every format, to and from the Flax model."""

import os
import pathlib
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import DTypeLike

from kvjax_models import gguf_files, safetensors_files
from kvjax_models.checkpoint import load_checkpoint, save_checkpoint
from kvjax_models.config import LlamaConfig
from kvjax_models.gguf_tokenizer import tokenizer_from_gguf
from kvjax_models.llama import Llama
from kvjax_models.sources import find_source, folder_config, has_orbax
from kvjax_models.tokenizer import Tokenizer
from kvjax_models.tokenizer_files import tokenizer_from_folder
from kvjax_models.weights import build_llama, parameter_dtype


class Loaded(NamedTuple):
    """A checkpoint in memory.

    Attributes:
        params: the model, a Flax NNX module.
        tokenizer: None where the checkpoint has none.
        config: the model's static configuration.
    """

    params: Llama
    tokenizer: Tokenizer | None
    config: LlamaConfig

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that turns a chat into a prompt, or None."""
        return self.tokenizer.chat_template if self.tokenizer is not None else None


def load(
    source: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    tokenizer: bool = True,
    revision: str | None = None,
) -> Loaded:
    """Loads a Llama-family checkpoint.

    Args:
        source: a folder of safetensors with config.json, a .gguf file, a folder that `save` wrote, or a name
            on the Hugging Face hub such as "HuggingFaceTB/SmolLM2-135M-Instruct". What exists here is a path. Of
            a folder's safetensors, model.safetensors is read where it is there, else the shards that
            model.safetensors.index.json lists, as transformers does; weights of two formats are an error.
        dtype: float32 or bfloat16, of every parameter. None: as saved by `save`; else bfloat16 where all
            matrices are stored so, and float32 otherwise (float16 and quantised weights lose nothing in it).
        tokenizer: load the tokenizer too, which needs the extra "text".
        revision: a branch, tag or commit on the hub.

    Raises:
        FileNotFoundError: `source` or a file that it names is not there.
        ValueError: the checkpoint is damaged, contradicts its configuration, holds weights that are not finite, or is
            not supported; or `dtype`.
        ImportError: a package for this kind of checkpoint is not installed.
    """
    _check_dtype(dtype)
    path = find_source(source, revision=revision)
    if path.is_file():
        return _load_gguf(path, dtype, tokenizer=tokenizer)
    return _load_folder(path, dtype, tokenizer=tokenizer)


def save(path: str | os.PathLike[str], model: Loaded | Llama, tokenizer: Tokenizer | None = None) -> None:
    """Writes an Orbax checkpoint that `load` reads back bit for bit.

    Args:
        path: a folder that does not exist yet, or is empty.
        model: the model; a `Loaded` brings its tokenizer along.
        tokenizer: saved with it; by default what `model` brings.

    Raises:
        FileExistsError: `path` holds something already.
    """
    if isinstance(model, Loaded):
        tokenizer = tokenizer or model.tokenizer
        model = model.params
    save_checkpoint(pathlib.Path(path), model, tokenizer)


def _check_dtype(dtype: DTypeLike | None) -> None:
    if dtype is None:
        return
    try:
        supported = jnp.dtype(dtype) in (jnp.dtype("float32"), jnp.dtype("bfloat16"))
    except TypeError:
        supported = False
    if not supported:
        raise ValueError(f"`dtype` must be float32, bfloat16 or None, got {dtype!r}.")


def _load_gguf(file: pathlib.Path, dtype: DTypeLike | None, *, tokenizer: bool) -> Loaded:
    config, metadata, tensors = gguf_files.open_gguf(file)
    model = build_llama(
        config,
        tensors,
        names=gguf_files.NAMES,
        ignored=gguf_files.ignored_name,
        dtype=parameter_dtype(tensors.values()) if dtype is None else dtype,
        source=file,
    )
    return Loaded(model, tokenizer_from_gguf(metadata, file=file) if tokenizer else None, config)


def _load_folder(folder: pathlib.Path, dtype: DTypeLike | None, *, tokenizer: bool) -> Loaded:
    config = folder_config(folder)
    model = load_checkpoint(folder, config, dtype) if has_orbax(folder) else _load_safetensors(folder, config, dtype)
    return Loaded(model, tokenizer_from_folder(folder) if tokenizer else None, config)


def _load_safetensors(folder: pathlib.Path, config: LlamaConfig, dtype: DTypeLike | None) -> Llama:
    tensors = safetensors_files.stored_tensors(folder)
    if config.tie_word_embeddings:
        safetensors_files.check_tied(tensors)
    return build_llama(
        config,
        tensors,
        names=safetensors_files.NAMES,
        ignored=lambda name: safetensors_files.ignored_name(name, tied=config.tie_word_embeddings),
        dtype=parameter_dtype(tensors.values()) if dtype is None else dtype,
        source=folder,
    )
