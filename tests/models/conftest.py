"""Fixtures of the model tests: a dense attention to check against, and GGUF files."""

import pathlib
from collections.abc import Callable

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import kvjax_models
from kvjax.files import read_json
from kvjax_models.hugging_face_config import config_from_hugging_face

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="session")
def dense_logits() -> Callable[[kvjax_models.Llama, np.ndarray], np.ndarray]:
    """Logits [T, V] of one prompt under plain causal attention."""

    def logits(model: kvjax_models.Llama, prompt: np.ndarray) -> np.ndarray:
        tokens = jnp.asarray(prompt, jnp.int32)[None]
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        rope = model.config.rope

        def attend(layer, query, key, value):
            del layer
            groups = query.shape[2] // key.shape[2]
            query = rope.rotate(query, positions)
            key = jnp.repeat(rope.rotate(key, positions), groups, axis=2)
            scores = jnp.einsum("bqnd,bknd->bnqk", query, key) / jnp.sqrt(jnp.float32(query.shape[-1]))
            visible = positions[:, None, :, None] >= positions[:, None, None, :]
            weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
            return jnp.einsum("bnqk,bknd->bqnd", weights, jnp.repeat(value, groups, axis=2))

        return np.asarray(model.logits(model(tokens, attend)[0]))

    return logits


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., pathlib.Path]:
    """Writes a folder of safetensors as the GGUF file that llama.cpp's converter would make of it."""

    def write(
        folder: pathlib.Path,
        file: pathlib.Path,
        kind: str = "F32",
        *,
        change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
        rope_factors: np.ndarray | None = None,
    ) -> pathlib.Path:
        config = config_from_hugging_face(read_json(folder / "config.json"))
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_vocab_size(config.vocab_size)
        writer.add_eos_token_id(2)
        change(writer)
        if rope_factors is not None:
            writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for name, values in safetensors.numpy.load_file(folder / "model.safetensors").items():
            stored, leaf = name.rsplit(".", 1)
            for theirs, ours in GGUF_NAMES.items():
                if stored.endswith(theirs):
                    layer = stored.removesuffix(theirs).removeprefix("model.layers.")
                    stored = f"blk.{layer}{ours}" if layer else ours
            values = _interleaved(values, heads.get(stored.split(".")[-1]))
            # Vectors stay in float32, as llama.cpp keeps them.
            number = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
            writer.add_tensor(f"{stored}.{leaf}", gguf.quantize(values, number), raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return write


def _interleaved(values: np.ndarray, heads: int | None) -> np.ndarray:
    """The rows of each head's two rotary halves taken in turn."""
    if heads is None:
        return values
    rows = np.arange(len(values)).reshape(heads, -1)
    half = rows.shape[1] // 2
    order = np.concatenate([np.stack([head[:half], head[half:]], axis=1).ravel() for head in rows])
    return np.ascontiguousarray(values[order])
