"""Checkpoints by their name on the Hugging Face hub."""

import pathlib
import re

from kvjax.extras import extra
from kvjax_models.safetensors_files import INDEX_FILE, SINGLE_FILE

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Listed, not "*.safetensors": some repositories hold the same weights once more under other names.
_FILES = (
    "config.json",
    "generation_config.json",
    SINGLE_FILE,
    INDEX_FILE,
    "model-*-of-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


def is_hub_name(source: str) -> bool:
    """Whether `source`, which is no path that exists, reads as "organisation/name" on the hub.

    It does not where it ends like a file, or where its first part is a folder here: that is a mistyped path.
    """
    if not _NAME.fullmatch(source) or source.endswith((".gguf", ".safetensors")):
        return False
    return not pathlib.Path(source).parent.exists()


def download(name: str, *, revision: str | None = None) -> pathlib.Path:
    """Fetches a checkpoint's safetensors and tokenizer, or finds them in the hub's cache.

    Raises:
        FileNotFoundError: the hub cannot be reached and the cache lacks the checkpoint, or there is none.
    """
    with extra("hub", purpose=f"Loading {name!r} from the Hugging Face hub"):
        import huggingface_hub
    try:
        folder = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"{name!r} is no path here, and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {reason}). Check the name and the connection (and that HF_HUB_OFFLINE "
            f"is not set), set HF_TOKEN for a gated model, or pass a folder of safetensors or a .gguf file."
        ) from error
    return pathlib.Path(folder)


def download_config(name: str) -> pathlib.Path:
    """Fetches a checkpoint's config.json alone, or finds it in the hub's cache.

    Raises:
        FileNotFoundError: the hub cannot be reached and the cache lacks the file, or there is none.
    """
    with extra("hub", purpose=f"Reading the configuration of {name!r} from the Hugging Face hub"):
        import huggingface_hub
    try:
        return pathlib.Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"the configuration of {name!r} could not be fetched from the Hugging Face hub ({type(error).__name__}: "
            f"{reason}); give the path of a config.json."
        ) from error
