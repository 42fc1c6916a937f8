"""JSON files of a checkpoint."""

import json
import pathlib
from typing import Any


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file holds no JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(content).__name__}.")
    return content
