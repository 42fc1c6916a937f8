"""What a source is: a folder or a file here, or a name on the Hugging Face hub."""

import os
import pathlib

from kvjax_models import safetensors_files
from kvjax_models.checkpoint import WEIGHTS_FOLDER
from kvjax_models.config import LlamaConfig
from kvjax_models.hub import download, is_hub_name
from kvjax_models.hugging_face_config import CONFIG_FILE, read_hugging_face_config


def find_source(source: str | os.PathLike[str], *, revision: str | None = None) -> pathlib.Path:
    """The folder or file that a source is; what exists here is a path, and what does not may be fetched from the hub.

    Raises:
        FileNotFoundError: `source` is not there.
        ValueError: `source` is empty, is neither file nor folder, or has a `revision` and is no name on the hub.
    """
    if not os.fspath(source):
        raise ValueError("`source` must be a path or a name on the hub, got ''.")
    path = pathlib.Path(source).expanduser()
    # A null character in a path is a ValueError of Python's own.
    if "\0" in str(path) or not path.exists():
        if not isinstance(source, str) or not is_hub_name(source):
            raise FileNotFoundError(f"`source` is no file or folder, nor a name on the hub: {str(source)!r}.")
        return download(source, revision=revision)
    if revision is not None:
        raise ValueError(f"`revision` is for names on the hub, got {revision!r} with the path {path}.")
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"`source` must be a .gguf file or a folder, got {path}, which is neither file nor folder.")
    return path


def folder_config(folder: pathlib.Path) -> LlamaConfig:
    """The configuration of the checkpoint in a folder.

    Raises:
        FileNotFoundError: the folder has no config.json.
        ValueError: it is damaged or not supported.
    """
    if not (folder / CONFIG_FILE).exists():
        found = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f" Pass one of its GGUF files: {', '.join(found)}." if found else ""
        raise FileNotFoundError(f"{folder} holds no {CONFIG_FILE}.{hint}")
    return read_hugging_face_config(folder / CONFIG_FILE)


def has_orbax(folder: pathlib.Path) -> bool:
    """Whether a checkpoint's weights are Orbax's.

    Raises:
        ValueError: there are safetensors too, and either may be the newer.
    """
    if not (folder / WEIGHTS_FOLDER).is_dir():
        return False
    for name in (safetensors_files.SINGLE_FILE, safetensors_files.INDEX_FILE):
        if (folder / name).exists():
            raise ValueError(f"{folder} holds {WEIGHTS_FOLDER} and {name}: remove the weights that are not meant.")
    return True
