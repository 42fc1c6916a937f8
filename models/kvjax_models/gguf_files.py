"""GGUF checkpoints, as llama.cpp writes them for Llama-family models."""

import dataclasses
import functools
import math
import mmap
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from kvjax.extras import extra
from kvjax.fields import shown
from kvjax.files import open_regular, reading
from kvjax_models.config import LlamaConfig
from kvjax_models.gguf_config import config_from_gguf
from kvjax_models.gguf_header import TensorEntry, check_apart, read_header
from kvjax_models.weights import StoredTensor, check_finite

#: Types of tensors that are read; the gguf package knows their blocks.
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

#: Module of the Llama: its name in llama.cpp's files.
NAMES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "layers.input_norm": "blk.{layer}.attn_norm",
    "layers.post_attention_norm": "blk.{layer}.ffn_norm",
    "layers.q_proj": "blk.{layer}.attn_q",
    "layers.k_proj": "blk.{layer}.attn_k",
    "layers.v_proj": "blk.{layer}.attn_v",
    "layers.o_proj": "blk.{layer}.attn_output",
    "layers.gate_proj": "blk.{layer}.ffn_gate",
    "layers.up_proj": "blk.{layer}.ffn_up",
    "layers.down_proj": "blk.{layer}.ffn_down",
}
#: Quantised type: the bytes of a block's float16 scales. Where these are finite, so is everything that they scale.
_SCALES = {"Q8_0": (0, 2), "Q4_0": (0, 2), "Q4_1": (0, 4), "Q4_K": (0, 4), "Q6_K": (208, 210)}
_ROPE_FACTORS = "rope_freqs.weight"

#: Quantised bytes that become values at once.
_DEQUANTIZED_BYTES = 1 << 18


class GGUFFile(NamedTuple):
    """A GGUF file whose tensors are not read yet.

    Attributes:
        config: the model's configuration.
        metadata: the key-value pairs; the tokenizer's are among them.
        tensors: by name; queries and keys already in Hugging Face's order of rotary halves.
    """

    config: LlamaConfig
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def ignored_name(name: str) -> bool:
    """Whether a tensor is no parameter: RoPE's factors are read into the configuration."""
    return name == _ROPE_FACTORS


def open_gguf(file: pathlib.Path) -> GGUFFile:
    """Reads the header and maps the tensors.

    Raises:
        ValueError: the file is damaged or cut short, or its model or a tensor's type is not supported.
    """
    if file.suffix != ".gguf":
        raise ValueError(f"`source` must be a .gguf file or a folder, got the file {file}.")
    with reading(file, what="a GGUF file of a Llama that is supported"), open_regular(file) as opened:
        if not opened.read(1):
            raise ValueError(f"{file} is empty, not a GGUF file.")
        content = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        header = read_header(content, file=file)
        ends = {name: _end(name, entry, file, size=len(content)) for name, entry in header.tensors.items()}
        check_apart(ends, header.tensors, file=file)
        stored = {name: _stored(name, entry, content[: ends[name]], file) for name, entry in header.tensors.items()}
        factors = stored[_ROPE_FACTORS].read() if _ROPE_FACTORS in stored else None
        config = config_from_gguf(header.metadata, tensor_names=stored, rope_factors=factors, source=file)
    return GGUFFile(config, header.metadata, _in_hugging_face_order(stored, config))


def split_rotary_halves(rows: Shaped[np.ndarray, "rows *columns"], heads: int) -> Shaped[np.ndarray, "rows *columns"]:
    """Undoes llama.cpp's order of the rows of queries and keys.

    It interleaves each head's rotary halves (0, D/2, 1, D/2 + 1, ...), Hugging Face keeps them apart.
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _end(name: str, entry: TensorEntry, file: pathlib.Path, *, size: int) -> int:
    """The byte after a tensor's last one.

    Raises:
        ValueError: its type is not supported, or it has no whole blocks, or ends after the file.
    """
    with extra("gguf", purpose="Reading GGUF"):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    known = {int(kind): kind for kind in GGMLQuantizationType}
    kind = known.get(entry.type_number)
    if kind is None or kind.name not in TYPES:
        got = entry.type_number if kind is None else kind.name
        raise ValueError(f"{file}: the tensor {shown(name)} must be one of {', '.join(TYPES)}, got type {got}.")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not all(entry.shape) or not entry.shape or entry.shape[-1] % block:
        raise ValueError(f"{file}: the tensor {shown(name)} of shape {entry.shape} has no whole {kind.name} blocks.")
    # Python's product: NumPy's wraps.
    end = entry.start + math.prod(entry.shape) // block * block_bytes
    if end > size:
        raise ValueError(f"{file} is cut short: the tensor {shown(name)} ends at byte {end}, the file at {size}.")
    return end


def _stored(name: str, entry: TensorEntry, content: memoryview, file: pathlib.Path) -> StoredTensor:
    """The tensor that `content` ends with."""
    with extra("gguf", purpose="Reading GGUF"):
        from gguf import GGMLQuantizationType
    kind = GGMLQuantizationType(entry.type_number).name
    raw = np.frombuffer(content, np.uint8, offset=entry.start).reshape(*entry.shape[:-1], -1)
    read = functools.partial(_read, raw, kind, name, file)
    return StoredTensor(name=name, file=file, shape=entry.shape, dtype=kind, read=read, finite=kind in _SCALES)


def _read(raw: Shaped[np.ndarray, "*rows bytes"], kind: str, name: str, file: pathlib.Path) -> np.ndarray:
    if kind in _SCALES:
        with extra("gguf", purpose="Reading GGUF"):
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
        first, last = _SCALES[kind]
        scales = raw.reshape(-1, block_bytes)[:, first:last].copy().view(np.float16)
        check_finite(scales, name=name, file=file)
    return dequantized(raw, kind)


def dequantized(raw: Shaped[np.ndarray, "*rows bytes"], kind: str) -> Float[np.ndarray, "*rows columns"]:
    """The values of rows of bytes; plain types keep their own type, quantised ones become float32."""
    plain = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}
    if kind in plain:
        return raw.view(plain[kind])
    with extra("gguf", purpose="Reading GGUF"):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
    # Many rows at once, which `quants.dequantize` does not: it takes sixteen, and twice as long. Not all: what lies
    # between bytes and values is several times as large as they are.
    lines = raw.reshape(-1, raw.shape[-1])
    many = max(1, _DEQUANTIZED_BYTES // raw.shape[-1])
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    values = np.empty((len(lines), raw.shape[-1] // block_bytes * block), np.float32)
    for start in range(0, len(lines), many):
        values[start : start + many] = getattr(quants, kind).dequantize_rows(lines[start : start + many])
    return values.reshape(*raw.shape[:-1], -1)


def _in_hugging_face_order(stored: Mapping[str, StoredTensor], config: LlamaConfig) -> dict[str, StoredTensor]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = dict(stored)
    for name, tensor in stored.items():
        projection = name.split(".")[-2] if "." in name else name
        if projection in heads and tensor.shape[0] == heads[projection] * config.head_dim:
            read = functools.partial(_read_split, tensor, heads[projection])
            tensors[name] = dataclasses.replace(tensor, read=read)
    return tensors


def _read_split(tensor: StoredTensor, heads: int) -> np.ndarray:
    return split_rotary_halves(tensor.read(), heads)
