"""Safetensors checkpoints: one file, or shards that an index lists."""

import functools
import json
import pathlib
from collections.abc import Iterator

from kvjax.extras import extra
from kvjax_models.weights import StoredTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

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


def ignored_name(name: str, *, tied: bool) -> bool:
    """Whether Hugging Face's Llama leaves this tensor unread too."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def stored_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
    """Finds every tensor of the checkpoint, reading headers only.

    Raises:
        FileNotFoundError: there are no weights, or a file that the index names is not there.
        ValueError: a file is damaged, or lacks a tensor that the index says it holds.
    """
    if not (folder / INDEX_FILE).exists():
        if not (folder / SINGLE_FILE).exists():
            raise FileNotFoundError(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}.")
        return {tensor.name: tensor for tensor in _tensors_of(folder / SINGLE_FILE)}
    tensors: dict[str, StoredTensor] = {}
    weight_map = _weight_map(folder / INDEX_FILE)
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            name = next(name for name in weight_map if weight_map[name] == shard)
            raise FileNotFoundError(
                f"{folder / shard} is not there; {INDEX_FILE} says that it holds the tensor {name!r}."
            )
        tensors |= {tensor.name: tensor for tensor in _tensors_of(folder / shard)}
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise ValueError(f"{folder / shard} lacks the tensor {name!r}, which {INDEX_FILE} puts there.")
    return tensors


def _weight_map(file: pathlib.Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} must be JSON with a 'weight_map', got {error!r}.") from error
    if not weight_map:
        raise ValueError(f"{file} lists no tensors in its 'weight_map'.")
    return weight_map


def _tensors_of(file: pathlib.Path) -> Iterator[StoredTensor]:
    with extra("safetensors", purpose="Reading safetensors"):
        import safetensors
    try:
        handle = safetensors.safe_open(file, framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file{_where_cut(file)}: {error}.") from error
    for name in handle.keys():  # noqa: SIM118 (the handle is no dictionary)
        stored = handle.get_slice(name)
        shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
        if dtype not in ("F32", "F16", "BF16"):
            raise ValueError(f"{file}: the tensor {name!r} must be F32, F16 or BF16, got {dtype}.")
        read = functools.partial(handle.get_tensor, name)
        yield StoredTensor(name=name, file=file, shape=shape, dtype=dtype, read=read)


def _where_cut(file: pathlib.Path) -> str:
    """Names the first tensor that lies past the end of the file, where the header can be read."""
    length = file.stat().st_size
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        content = opened.read(min(size, length))
    try:
        header = json.loads(content)
        ends = {name: 8 + size + entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""
    cut = [name for name in sorted(ends, key=lambda name: ends[name]) if ends[name] > length]
    return f", it ends within or before the tensor {cut[0]!r}" if cut else ""
