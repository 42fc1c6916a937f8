"""Safetensors checkpoints: one file, or shards that an index lists.

Where a folder holds both, the single file is read and the index is not, as in transformers: an index that was left
beside a newer file would bring older weights back. Shards may lie in folders within the checkpoint's.
"""

import functools
import json
import pathlib
from typing import Any

import numpy as np

from kvjax.extras import extra
from kvjax.fields import Fields, shown
from kvjax.files import open_regular, read_json, reading
from kvjax_models.weights import StoredTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: Longest header, in bytes; the format's own limit.
_HEADER_LIMIT = 100_000_000

#: Module of the Llama: its name in Hugging Face's checkpoints.
NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "layers.input_norm": "model.layers.{layer}.input_layernorm",
    "layers.post_attention_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.q_proj": "model.layers.{layer}.self_attn.q_proj",
    "layers.k_proj": "model.layers.{layer}.self_attn.k_proj",
    "layers.v_proj": "model.layers.{layer}.self_attn.v_proj",
    "layers.o_proj": "model.layers.{layer}.self_attn.o_proj",
    "layers.gate_proj": "model.layers.{layer}.mlp.gate_proj",
    "layers.up_proj": "model.layers.{layer}.mlp.up_proj",
    "layers.down_proj": "model.layers.{layer}.mlp.down_proj",
}
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def ignored_name(name: str, *, tied: bool) -> bool:
    """Whether Hugging Face's Llama leaves this tensor unread too."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == _OUTPUT)


def check_tied(tensors: dict[str, StoredTensor]) -> None:
    """Raises a ValueError where tied embeddings lie beside an output matrix that is another.

    transformers 4 reads the embedding only, transformers 5 both: neither is guessed at.
    """
    embedding, output = tensors.get(_EMBEDDING), tensors.get(_OUTPUT)
    if embedding is None or output is None:
        return
    if embedding.shape != output.shape or not np.array_equal(embedding.read(), output.read()):
        raise ValueError(
            f"{output.file}: the tensor {_OUTPUT!r} differs from {_EMBEDDING!r}, which its configuration's "
            "`tie_word_embeddings` says it equals."
        )


def stored_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
    """Finds every tensor of the checkpoint, reading headers only.

    Raises:
        FileNotFoundError: there are no weights, or a file that the index names is not there.
        ValueError: a file is damaged, or lacks a tensor that the index says it holds.
    """
    if (folder / SINGLE_FILE).exists():
        return _tensors_of(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).exists():
        raise FileNotFoundError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}.")
    weight_map = _weight_map(folder / INDEX_FILE)
    tensors: dict[str, StoredTensor] = {}
    for shard, name in {shard: name for name, shard in weight_map.items()}.items():
        if not (folder / shard).exists():
            raise FileNotFoundError(
                f"{folder / shard} is not there; {INDEX_FILE} says that it holds the tensor {shown(name)}."
            )
        found = _tensors_of(folder / shard)
        for name in found.keys() & tensors.keys():
            raise ValueError(f"{folder / shard} holds the tensor {shown(name)}, and so does {tensors[name].file}.")
        tensors |= found
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file != folder / shard:
            raise ValueError(f"{folder / shard} lacks the tensor {shown(name)}, which {INDEX_FILE} puts there.")
    return tensors


def _weight_map(file: pathlib.Path) -> dict[str, pathlib.PurePosixPath]:
    """Each tensor's shard, a path within the checkpoint's folder."""
    fields = Fields(read_json(file), source=file).nested("weight_map")
    if not fields.values:
        raise ValueError(f"{file} lists no tensors in its `weight_map`.")
    shards = {name: pathlib.PurePosixPath(fields.text(name)) for name in fields.values}
    for name, shard in shards.items():
        # Not resolved: the hub's client links files into a folder of its own.
        outside = shard.is_absolute() or ".." in shard.parts or "\\" in str(shard) or ":" in str(shard)
        # Systems take names of up to 255 bytes, and paths of a few thousand.
        too_long = len(str(shard)) > 1024 or any(len(part.encode("utf-8", "replace")) > 255 for part in shard.parts)
        if outside or too_long or not shard.parts or "\0" in str(shard):
            fields.fail(name, "must be a file within the checkpoint's folder")
    return shards


def _tensors_of(file: pathlib.Path) -> dict[str, StoredTensor]:
    with extra("safetensors", purpose="Reading safetensors"):
        import safetensors
    # Before the package looks: it waits for pipes, keeps the last of two tensors of a name, and has no word on what
    # lies past the end of a file.
    _check_header(file)
    with reading(file, what="a whole safetensors file"):
        handle = safetensors.safe_open(file, framework="numpy")
        tensors = {}
        for name in handle.keys():  # noqa: SIM118 (the handle is no dictionary)
            stored = handle.get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if dtype not in ("F32", "F16", "BF16"):
                raise ValueError(f"{file}: the tensor {shown(name)} must be F32, F16 or BF16, got {dtype}.")
            read = functools.partial(handle.get_tensor, name)
            tensors[name] = StoredTensor(name=name, file=file, shape=shape, dtype=dtype, read=read)
    return tensors


def _check_header(file: pathlib.Path) -> None:
    """Raises a ValueError unless every tensor is named once and lies within the file."""
    with open_regular(file) as opened, reading(file, what="a whole safetensors file"):
        length = opened.seek(0, 2)
        opened.seek(0)
        size = int.from_bytes(opened.read(8), "little")
        if length < 8 or size > min(_HEADER_LIMIT, length - 8):
            raise ValueError(f"its header of {size:,} bytes does not lie in its {length:,} bytes.")
        header = json.loads(opened.read(size), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("its header must be a JSON object.")
        entries = Fields(header, source=file)
        for name in header.keys() - {"__metadata__"}:
            offsets = entries.nested(name).integers("data_offsets")
            if len(offsets) != 2 or offsets[0] > offsets[1]:
                entries.nested(name).fail("data_offsets", "must be a first byte and the one after the last")
        cut = [
            name for name in header if name != "__metadata__" and 8 + size + header[name]["data_offsets"][1] > length
        ]
        if cut:
            first = min(cut, key=lambda name: header[name]["data_offsets"])
            raise ValueError(f"it ends within or before the tensor {shown(first)}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"it names {shown(twice)} twice.")
    return names
