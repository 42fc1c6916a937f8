"""GGUF metadata: the models that are read, and everything that is refused by name."""

import math

import numpy as np
import pytest

from kvjax.rope import LinearScaling, Llama3Scaling
from kvjax_models.gguf_config import config_from_gguf

LLAMA31 = {
    "general.architecture": "llama",
    "llama.block_count": 32,
    "llama.context_length": 131072,
    "llama.embedding_length": 4096,
    "llama.feed_forward_length": 14336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 128,
    "llama.vocab_size": 128256,
    "tokenizer.ggml.bos_token_id": 128000,
    "tokenizer.ggml.eos_token_id": 128009,
}
UNTIED = ("output.weight",)


def factors(factor, *, head_dim, original=8192, low=1, high=4):
    """The tensor rope_freqs.weight, by the formula that llama.cpp's converter uses."""
    values = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * 500000.0 ** (index / head_dim)
        if wavelength < original / high:
            values.append(1.0)
        elif wavelength > original / low:
            values.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            values.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(values, np.float32)


def test_llama_3_is_read():
    config = config_from_gguf(LLAMA31, tensor_names=UNTIED)
    assert (config.head_dim, config.rms_norm_eps, config.rope.scaling) == (128, 1e-5, None)
    assert (config.eos_token_ids, config.bos_token_id) == ((128009,), 128000)
    assert not config.tie_word_embeddings


def test_tensors_tell_of_tied_embeddings_and_biases():
    config = config_from_gguf(LLAMA31, tensor_names=["blk.0.attn_q.bias", "blk.0.ffn_gate.bias"])
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert config.mlp_bias


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64), (32.0, 128)])
def test_the_scaling_of_llama_3_1_and_3_2_is_recovered_exactly(factor, head_dim):
    metadata = LLAMA31 | {"llama.attention.key_length": head_dim, "llama.rope.dimension_count": head_dim}
    config = config_from_gguf(metadata, tensor_names=UNTIED, rope_factors=factors(factor, head_dim=head_dim))
    assert config.rope.scaling == Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


def test_factors_of_one_scale_nothing():
    config = config_from_gguf(LLAMA31, tensor_names=UNTIED, rope_factors=np.ones(64, np.float32))
    assert config.rope.scaling is None


def test_linear_scaling_is_read():
    metadata = LLAMA31 | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf(metadata, tensor_names=UNTIED).rope.scaling == LinearScaling(factor=4.0)


def test_scaling_of_type_none_is_none():
    metadata = LLAMA31 | {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf(metadata, tensor_names=UNTIED).rope.scaling is None


def test_every_token_that_ends_an_answer_counts():
    metadata = LLAMA31 | {"tokenizer.ggml.eot_token_id": 128009, "tokenizer.ggml.eom_token_id": 128008}
    assert config_from_gguf(metadata, tensor_names=UNTIED).eos_token_ids == (128009, 128008)


REFUSED = [
    ({"general.architecture": "qwen2"}, r"`general.architecture` must be 'llama', got 'qwen2'"),
    ({"llama.expert_count": 8}, r"`llama.expert_count` must be 0, got 8"),
    ({"llama.attention.sliding_window": 4096}, r"`llama.attention.sliding_window` must be 0, got 4096"),
    ({"llama.rope.scaling.type": "yarn"}, r"`llama.rope.scaling.type` must be .* got 'yarn'"),
    ({"llama.rope.dimension_count": 64}, r"`llama.rope.dimension_count` must be the head size 128, got 64"),
    (
        {"llama.attention.value_length": 64},
        r"`llama.attention.value_length` must be the head size 128, got 64",
    ),
    (
        {"llama.attention.head_count_kv": [8, 4]},
        r"`llama.attention.head_count_kv` must be one number",
    ),
    ({"llama.attention.head_count": 24}, r"`llama.embedding_length` must be a multiple .*4096 and 24"),
    ({"llama.logit_scale": 8.0}, r"`llama.logit_scale` must be 0.0, got 8.0"),
    ({"split.count": 3}, r"`split.count` must be 0, got 3"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refuses_what_it_would_compute_wrongly(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_gguf(LLAMA31 | change, tensor_names=UNTIED)


@pytest.mark.parametrize("key", ["general.architecture", "llama.block_count", "llama.embedding_length"])
def test_a_missing_key_is_named(key):
    metadata = {name: value for name, value in LLAMA31.items() if name != key}
    with pytest.raises(ValueError, match=f"`{key}` is missing"):
        config_from_gguf(metadata, tensor_names=UNTIED)


def test_refuses_factors_that_no_llama_has():
    with pytest.raises(ValueError, match=r"'rope_freqs.weight' must hold Llama 3's RoPE scaling .*1.0 to 4.0"):
        config_from_gguf(LLAMA31, tensor_names=UNTIED, rope_factors=np.linspace(1, 4, 64, dtype=np.float32))


def test_refuses_factors_of_another_head_size():
    with pytest.raises(ValueError, match=r"'rope_freqs.weight' must be \(64,\), got \(32,\)"):
        config_from_gguf(LLAMA31, tensor_names=UNTIED, rope_factors=factors(8.0, head_dim=64))


def test_refuses_two_scalings_at_once():
    metadata = LLAMA31 | {"llama.rope.scaling.factor": 4.0}
    with pytest.raises(ValueError, match=r"`llama.rope.scaling.factor` is 4.0 beside .*'rope_freqs.weight'"):
        config_from_gguf(metadata, tensor_names=UNTIED, rope_factors=factors(8.0, head_dim=128))
