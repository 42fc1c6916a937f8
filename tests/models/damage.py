"""Every format that kvjax reads of others' files, and ways to damage a file of each.

Shared by the tests and `benchmarks/damaged_files.py`. A reader joins with a line in `FORMATS`.
"""

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save_file

import kvjax_models

# JSON texts, some of which are none.
EXTREMES = (
    "null", "true", "false", "0", "1", "-1", "2.0", "0.5", "7", "1e308", "-1e308", "1e-320", "1e400", "NaN", "Infinity",
    "-Infinity", "2147483648", "18446744073709551616", "1" + "0" * 30, "9" * 5000, '""', '"x"', '"1"', '"\\ud800"',
    '"\\u0000"', '"../x"', '"/etc/passwd"', '"."', "[]", "{}", "[null]", '["x"]', "[0, 1]", '{"x": 1}', "[[[[1]]]]",
    "[" * 900 + "]" * 900, "[" * 100_000, '{"x":' * 5000 + "1" + "}" * 5000, '"' + "x" * 100_000 + '"',
    "[" + "0," * 50_000 + "0]",
)  # fmt: skip
NAMES = (
    "x",
    "",
    "no_rope_layers",
    "use_qk_norm",
    "residual_multiplier",
    "num_hidden_layers",
    "a\nb",
    "\x00",
    "y" * 500,
)
NUMBERS = (0, 1, 2, 7, 31, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**63 + 8, 2**64 - 1)
_MARK = "@here@"


class Format(NamedTuple):
    """A format of files.

    Attributes:
        name: what to call it.
        file: the file that is damaged, within a folder.
        write: writes whole files into an empty folder.
        read: reads the folder.
        damaged: contents of `file` from its whole content.
        refusals: what a damaged file may raise.
    """

    name: str
    file: str
    write: Callable[[pathlib.Path], None]
    read: Callable[[pathlib.Path], object]
    damaged: Callable[[bytes], st.SearchStrategy[bytes]]
    refusals: tuple[type[Exception], ...] = (ValueError,)


def damaged_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """One to three edits: bytes changed, a number overwritten by an extreme, cut, left out, inserted, repeated."""
    # Headers come first, and are where harm is done.
    at = st.one_of(st.integers(0, len(content) - 1), st.integers(0, min(len(content), 800) - 1))
    number = st.builds(
        lambda value, width: (value % 256**width).to_bytes(width, "little"),
        st.sampled_from(NUMBERS),
        st.sampled_from((1, 4, 8)),
    )
    few, some, length = st.binary(min_size=1, max_size=4), st.binary(min_size=1, max_size=16), st.integers(1, 64)
    in_place = st.builds(lambda at, new: lambda b: b[:at] + new + b[at + len(new) :], at, st.one_of(few, number))
    any_edit = st.one_of(
        in_place,
        st.builds(lambda at: lambda b: b[:at], at),
        st.builds(lambda at, length: lambda b: b[:at] + b[at + length :], at, length),
        st.builds(lambda at, more: lambda b: b[:at] + more + b[at:], at, some),
        st.builds(lambda at, length: lambda b: b[: at + length] + b[at:], at, length),
    )
    edits = st.one_of(st.lists(in_place, min_size=1, max_size=2), st.lists(any_edit, min_size=1, max_size=3))
    return edits.map(lambda edits: functools.reduce(lambda changed, edit: edit(changed), edits, content))


def damaged_json(content: bytes) -> st.SearchStrategy[bytes]:
    """A value replaced by an extreme, left out, nested or added; or damaged as bytes."""
    value = json.loads(content)
    places = st.sampled_from(list(_places(value)))
    changes = st.sampled_from(("replace", "replace", "replace", "remove", "nest", "add"))
    edited = st.builds(
        functools.partial(_edited, content), places, changes, st.sampled_from(NAMES), st.sampled_from(EXTREMES)
    )
    return st.one_of(edited, edited, edited, damaged_bytes(content))


def damaged_safetensors(content: bytes) -> st.SearchStrategy[bytes]:
    """The header damaged as JSON, its length right; or the whole file as bytes."""
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    headers = damaged_json(header).map(lambda header: len(header).to_bytes(8, "little") + header + data)
    return st.one_of(headers, headers, damaged_bytes(content))


def _places(value: Any, place: tuple[Any, ...] = ()) -> Any:
    yield place
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from _places(entry, (*place, key))


def _edited(content: bytes, place: tuple[Any, ...], change: str, name: str, extreme: str) -> bytes:
    root = {"root": json.loads(content)}
    *parents, key = ("root", *place)
    holder: Any = functools.reduce(lambda value, step: value[step], parents, root)
    if change == "add" and isinstance(holder[key], dict):
        holder[key][name] = _MARK
    elif change == "nest":
        holder[key] = [holder[key]]
    elif change == "remove" and place:
        del holder[key]
    else:
        holder[key] = _MARK
    return json.dumps(root["root"]).replace(json.dumps(_MARK), extreme).encode("utf-8", "surrogatepass")


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": [2],
    "bos_token_id": 1,
    "torch_dtype": "float32",
}  # fmt: skip
_LAYER = "model.layers.0."
_SHAPES = {
    "model.embed_tokens": (8, 8),
    f"{_LAYER}self_attn.q_proj": (8, 8),
    f"{_LAYER}self_attn.k_proj": (4, 8),
    f"{_LAYER}self_attn.v_proj": (4, 8),
    f"{_LAYER}self_attn.o_proj": (8, 8),
    f"{_LAYER}mlp.gate_proj": (8, 8),
    f"{_LAYER}mlp.up_proj": (8, 8),
    f"{_LAYER}mlp.down_proj": (8, 8),
    f"{_LAYER}input_layernorm": (8,),
    f"{_LAYER}post_attention_layernorm": (8,),
    "model.norm": (8,),
}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    _LAYER: "blk.0.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def write_folder(folder: pathlib.Path) -> None:
    """Writes a tiny Llama in one safetensors file."""
    random = np.random.default_rng(0)
    tensors = {f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in _SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3], "temperature": 0.6}))


def write_shards(folder: pathlib.Path) -> None:
    """Writes the same in a shard that an index lists."""
    write_folder(folder)
    (folder / "part").mkdir()
    (folder / "model.safetensors").rename(folder / "part" / "shard.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": {f"{n}.weight": "part/shard.safetensors" for n in _SHAPES}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gguf(folder: pathlib.Path) -> None:
    """Writes the same as GGUF."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(8)
    writer.add_eos_token_id(2)
    writer.add_token_list(list("abcdefgh"))
    writer.add_token_scores([0.0] * 8)
    random = np.random.default_rng(0)
    for name, shape in _SHAPES.items():
        stored = re.sub("|".join(map(re.escape, _GGUF_NAMES)), lambda match: _GGUF_NAMES[match[0]], name)
        writer.add_tensor(f"{stored}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_folder(folder: pathlib.Path) -> object:
    """Loads what `write_folder` or `write_shards` wrote."""
    return kvjax_models.load(folder, tokenizer=False)


def read_configuration(folder: pathlib.Path) -> object:
    """Reads the configuration alone, as a plan does, then the model."""
    config = kvjax_models.describe(folder / "config.json", config_only=True).config
    return kvjax_models.model_size(config, "bfloat16"), read_folder(folder)


def read_gguf(folder: pathlib.Path) -> object:
    """Loads what `write_gguf` wrote."""
    return kvjax_models.load(folder / "model.gguf", tokenizer=False)


FORMATS = (
    Format("GGUF", "model.gguf", write_gguf, read_gguf, damaged_bytes),
    Format("safetensors", "model.safetensors", write_folder, read_folder, damaged_safetensors),
    # A shard that is not there is a FileNotFoundError.
    Format(
        "safetensors index",
        "model.safetensors.index.json",
        write_shards,
        read_folder,
        damaged_json,
        (ValueError, FileNotFoundError),
    ),
    Format("config.json", "config.json", write_folder, read_configuration, damaged_json),
    Format("generation_config.json", "generation_config.json", write_folder, read_folder, damaged_json),
)
