"""The model of a plan: its configuration is enough."""

import pathlib
from typing import TYPE_CHECKING

from kvjax.cli.errors import UserError
from kvjax.extras import extra

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
    from kvjax.cli.models import open_checkpoint
    from kvjax_models.hub import is_hub_name
    from kvjax_models.hugging_face_config import config_from_hugging_face
    from kvjax_models.json_files import read_json

    known = kvjax_models.KNOWN_MODELS
    if model.lower() in known:
        return known[model.lower()]
    path = pathlib.Path(model).expanduser()
    if not path.exists():
        if not is_hub_name(model):
            raise UserError(
                f"MODEL must be one of {', '.join(known)}, a config.json or a folder with one, a checkpoint, or a name "
                f"on the hub; got {model!r}."
            )
        path = _fetch_config(model)
    file = path / "config.json" if (path / "config.json").is_file() else path
    if file.suffix == ".json" and file.is_file():
        return config_from_hugging_face(read_json(file))
    return open_checkpoint(str(path)).config


def _fetch_config(name: str) -> pathlib.Path:
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
