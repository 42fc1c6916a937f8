"""The model of a plan: its configuration is enough."""

import pathlib
from typing import TYPE_CHECKING

from kvjax.cli.errors import UserError

if TYPE_CHECKING:
    import kvjax_models


def read_config(model: str) -> "kvjax_models.LlamaConfig":
    """The configuration of a model; no weights are read.

    Args:
        model: a name in `kvjax_models.KNOWN_MODELS`, a config.json or a folder with one, a checkpoint, or a name on
            the Hugging Face hub, of which only config.json is fetched.

    Raises:
        UserError: none of these.
        ValueError: a configuration that is damaged or not supported.
        OSError: the hub cannot be reached, or has no such model.
    """
    import kvjax_models
    from kvjax_models.hub import is_hub_name

    known = kvjax_models.KNOWN_MODELS
    if model.lower() in known:
        return known[model.lower()]
    if not pathlib.Path(model).expanduser().exists() and not is_hub_name(model):
        raise UserError(
            f"MODEL must be one of {', '.join(known)}, a config.json or a folder with one, a checkpoint, or a name "
            f"on the hub; got {model!r}."
        )
    return kvjax_models.describe(model, config_only=True).config
