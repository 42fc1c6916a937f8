"""Gets JAX and a model ready."""

import logging
import os
from typing import TYPE_CHECKING

from kvjax.cli.compilation_cache import use_compilation_cache
from kvjax.cli.progress import activity

if TYPE_CHECKING:
    import kvjax_models


def load_model(name: str | None, *, dtype: str | None) -> "kvjax_models.Loaded":
    """Loads a model.

    Args:
        name: a path or a name on the hub; None for the embedded model.
        dtype: of the parameters, or None for the one that suits the checkpoint.

    Raises:
        ValueError: see `kvjax_models.load`.
        OSError: see `kvjax_models.load`.
        ImportError: see `kvjax_models.load`.
    """
    source = model_source(name)
    prepare_jax()
    with activity(f"Loading {model_name(name)}"):
        import kvjax_models

        return kvjax_models.load(source, dtype)


def prepare_jax() -> None:
    """Keeps compiled programs, and JAX and the hub's client quiet: stderr belongs to the command."""
    # Otherwise a laptop is told that some accelerator of its could be used.
    logging.getLogger("jax").setLevel(logging.ERROR)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    use_compilation_cache()


def model_source(name: str | None) -> str:
    """What `kvjax_models.load` is to load."""
    import kvjax_models

    return str(kvjax_models.embedded_model()) if name is None else name


def model_name(name: str | None) -> str:
    """What to call the model."""
    return "SmolLM2-135M-Instruct" if name is None else name
