"""`describe`: what a checkpoint is, without its weights."""

import collections
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from kvjax_models import gguf_files, safetensors_files
from kvjax_models.checkpoint import stored_dtypes
from kvjax_models.config import LlamaConfig
from kvjax_models.gguf_tokenizer import tokenizer_from_gguf
from kvjax_models.hub import download_config, is_hub_name
from kvjax_models.hugging_face_config import read_hugging_face_config
from kvjax_models.sources import find_source, folder_config, has_orbax
from kvjax_models.tokenizer import Tokenizer
from kvjax_models.tokenizer_files import tokenizer_from_folder


class Description(NamedTuple):
    """A checkpoint without its weights.

    Attributes:
        kind: its format: "GGUF", "safetensors", "Orbax", or "configuration" where only that was looked at.
        path: where it lies.
        config: the model's configuration.
        tokenizer: None where it has none, or was not looked for.
        stored: how many tensors are stored in each type.
    """

    kind: str
    path: pathlib.Path
    config: LlamaConfig
    tokenizer: Tokenizer | None
    stored: Mapping[str, int]


def describe(source: str | os.PathLike[str], *, config_only: bool = False) -> Description:
    """Reads what can be known of a checkpoint without its weights.

    Args:
        source: what `load` takes, or a config.json.
        config_only: look at nothing beside the configuration; of a name on the hub only config.json is fetched.

    Raises:
        FileNotFoundError: `source` or a file that it names is not there.
        ValueError: the checkpoint is damaged or not supported.
        ImportError: a package for this kind of checkpoint is not installed.
    """
    if config_only and isinstance(source, str) and is_hub_name(source):
        path = download_config(source)
    else:
        path = find_source(source)
    if path.suffix == ".json" and path.is_file():
        return Description("configuration", path, read_hugging_face_config(path), None, {})
    if path.is_file():
        config, metadata, tensors = gguf_files.open_gguf(path)
        tokenizer = None if config_only else tokenizer_from_gguf(metadata, file=path)
        return Description("GGUF", path, config, tokenizer, collections.Counter(t.dtype for t in tensors.values()))
    config = folder_config(path)
    if config_only:
        return Description("configuration", path, config, None, {})
    if has_orbax(path):
        return Description("Orbax", path, config, tokenizer_from_folder(path), stored_dtypes(path, config))
    stored = collections.Counter(tensor.dtype for tensor in safetensors_files.stored_tensors(path).values())
    return Description("safetensors", path, config, tokenizer_from_folder(path), stored)
