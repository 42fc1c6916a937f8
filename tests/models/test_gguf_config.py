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
    ({"general.type": "adapter"}, r"`general.type` must be 'model', got 'adapter'"),
    ({"llama.rope.freq_base": 0.0}, r"`llama.rope.freq_base` must be a number above 1, got 0.0"),
    ({"llama.rope.freq_base": math.nan}, r"`llama.rope.freq_base` must be finite, got nan"),
    ({"llama.rope.freq_base": True}, r"`llama.rope.freq_base` must be a number, got True"),
    ({"llama.rope.freq_base": 1e300}, r"`llama.rope.freq_base` must be at most 1e\+15, got 1e\+300"),
    ({"llama.rope.scaling.factor": math.nan}, r"`llama.rope.scaling.factor` must be finite, got nan"),
    ({"llama.rope.scaling.factor": -2.0}, r"`llama.rope.scaling.factor` must be 0 or from 1 .* got -2.0"),
    ({"llama.rope.scale_linear": math.inf}, r"`llama.rope.scale_linear` must be finite, got inf"),
    ({"llama.attention.layer_norm_rms_epsilon": math.inf}, r"layer_norm_rms_epsilon` must be finite, got inf"),
    ({"llama.attention.layer_norm_rms_epsilon": 1e-320}, r"layer_norm_rms_epsilon` must be from 1e-30 to 1, got"),
    ({"llama.block_count": 2**32 - 1}, r"`llama.block_count` must be from 1 to 4096, got 4294967295"),
    ({"llama.attention.head_count": 0}, r"`llama.attention.head_count` must be from 1 to 4096, got 0"),
    ({"llama.context_length": 10**30}, r"`llama.context_length` must be from 1 to 2147483647, got 1000"),
    ({"llama.vocab_size": "many"}, r"`llama.vocab_size` must be an integer, got 'many'"),
    ({"tokenizer.ggml.eos_token_id": 128256}, r"`tokenizer.ggml.eos_token_id` must be from 0 to 128255, got 128256"),
    ({"tokenizer.ggml.eot_token_id": True}, r"`tokenizer.ggml.eot_token_id` must be an integer, got True"),
    ({"tokenizer.ggml.bos_token_id": 2.0}, r"`tokenizer.ggml.bos_token_id` must be an integer, got 2.0"),
    *(
        ({f"llama.{key}": value}, rf"`llama.{key}` is no key of a plain Llama, got {value}")
        for key, value in {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "attention.max_alibi_bias": 8.0,
            "attention.temperature_scale": 0.1,
            "attention.output_scale": 0.5,
            "expert_used_count": 2,
            "rope.freq_base_swa": 10000.0,
            "rope.dimension_sections": 4,
            "nextn_predict_layers": 1,
            "interleave_moe_layer_step": 2,
        }.items()
    ),
    ({"llama.attention.clamp_kqv": 8.0}, r"`llama.attention.clamp_kqv` must be 0.0, got 8.0"),
    ({"llama.attention.scale": 0.1}, r"`llama.attention.scale` must be 0.0, got 0.1"),
    ({"llama.attention.causal": False}, r"`llama.attention.causal` must be True, got False"),
    ({"llama.rope.scaling.yarn_ext_factor": 1.0}, r"`llama.rope.scaling.yarn_ext_factor` must be 0.0, got 1.0"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refuses_what_it_would_compute_wrongly(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_gguf(LLAMA31 | change, tensor_names=UNTIED)


def test_keys_that_say_none_are_no_keys():
    none = {"llama.expert_count": 0, "llama.attn_logit_softcapping": 0.0, "llama.swin_norm": False, "quantize.x": 1}
    assert config_from_gguf(LLAMA31 | none, tensor_names=UNTIED) == config_from_gguf(LLAMA31, tensor_names=UNTIED)


@pytest.mark.parametrize("damage", [math.nan, math.inf, 0.0, -8.0])
def test_refuses_factors_that_are_no_numbers(damage):
    values = factors(8.0, head_dim=128)
    values[-1] = damage
    with pytest.raises(ValueError, match=r"'rope_freqs.weight' must hold Llama 3's RoPE scaling"):
        config_from_gguf(LLAMA31, tensor_names=UNTIED, rope_factors=values)


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
