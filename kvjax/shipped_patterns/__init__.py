"""Head patterns that come with kvjax, each a folder that `kvjax duo identify` wrote."""

import functools
import importlib.resources
import json

from kvjax.head_pattern import HeadPattern
from kvjax.state import ModelSpec


@functools.cache
def shipped_pattern(model: ModelSpec) -> HeadPattern:
    """The pattern that was learned for a model of these sizes and this position embedding.

    A spec does not tell fine-tuned models of one architecture apart: SmolLM2-135M gets what was learned for
    SmolLM2-135M-Instruct.

    Raises:
        ValueError: there is none; says how to get one.
    """
    names = []
    for folder in sorted(importlib.resources.files(__name__).iterdir(), key=lambda entry: entry.name):
        about = folder / "training.json"
        if not about.is_file():
            continue
        names.append(folder.name)
        if json.loads(about.read_text(encoding="utf-8"))["model"] == model_sizes(model):
            with importlib.resources.as_file(folder) as path:
                return HeadPattern.load(path)
    raise ValueError(
        f"`pattern` must be given for this model: kvjax comes with {' and '.join(names)}'s only. Learn one with "
        "`kvjax duo identify MODEL --out DIR` or `kvjax.duo.identify`, and read it, or one that the authors have "
        "published, with `kvjax.HeadPattern.load(DIR)`."
    )


def model_sizes(model: ModelSpec) -> dict[str, object]:
    """What tells models apart, as JSON has it."""
    return {
        "num_layers": model.num_layers,
        "num_query_heads": model.num_query_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "rope": repr(model.rope),
    }
