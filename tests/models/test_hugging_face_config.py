"""config.json: the models that are read, and everything that is refused by name."""

import pytest

from kvjax.rope import LinearScaling, Llama3Scaling, Rope
from kvjax_models.hugging_face_config import config_from_hugging_face, config_to_hugging_face

LLAMA2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA32 = LLAMA2 | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
MISTRAL = LLAMA2 | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}


def test_llama_2_is_read():
    config = config_from_hugging_face(LLAMA2)
    assert config.rope == Rope(head_dim=128, theta=10000.0)
    assert config.num_key_value_heads == 32
    assert config.eos_token_ids == (2,)
    assert not config.tie_word_embeddings


def test_absent_key_value_heads_are_all_heads():
    fields = {name: value for name, value in LLAMA2.items() if name != "num_key_value_heads"}
    assert config_from_hugging_face(fields).num_key_value_heads == 32


def test_llama_3_2_is_read():
    config = config_from_hugging_face(LLAMA32)
    scaling = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    assert config.rope == Rope(head_dim=64, theta=500000.0, scaling=scaling)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.tie_word_embeddings


def test_mistral_without_a_window_is_read():
    assert config_from_hugging_face(MISTRAL).rope.theta == 1000000.0


def test_old_and_new_rope_fields_mean_the_same():
    new = {name: value for name, value in LLAMA32.items() if name not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = LLAMA3_ROPE | {"rope_theta": 500000.0}
    assert config_from_hugging_face(new) == config_from_hugging_face(LLAMA32)


def test_the_oldest_rope_fields_are_read():
    config = config_from_hugging_face(LLAMA2 | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.rope.scaling == LinearScaling(factor=2.0)


def test_the_end_tokens_for_generation_win():
    config = config_from_hugging_face(LLAMA2, {"eos_token_id": [2, 7]})
    assert config.eos_token_ids == (2, 7)
    assert config_from_hugging_face(LLAMA2, {"eos_token_id": 9}).eos_token_ids == (9,)
    assert config_from_hugging_face(LLAMA2, {"bos_token_id": 1}).eos_token_ids == (2,)


@pytest.mark.parametrize("fields", [LLAMA2, LLAMA32, MISTRAL])
def test_a_written_configuration_reads_back_equal(fields):
    config = config_from_hugging_face(fields)
    assert config_from_hugging_face(config_to_hugging_face(config)) == config


def test_equal_configurations_hash_equal():
    assert hash(config_from_hugging_face(LLAMA32)) == hash(config_from_hugging_face(dict(LLAMA32)))


YARN = {"rope_type": "yarn", "factor": 4.0}
REFUSED = [
    ({"model_type": "qwen2"}, r"`model_type` must be one of .*'qwen2'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, r"`architectures` .*SequenceClassification"),
    ({"hidden_act": "gelu"}, r"`hidden_act` must be 'silu', got 'gelu'"),
    ({"sliding_window": 4096}, r"`sliding_window` must be None, got 4096"),
    ({"partial_rotary_factor": 0.5}, r"`partial_rotary_factor` .* got 0.5"),
    ({"quantization_config": {"quant_method": "awq"}}, r"`quantization_config` .*awq"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, r"`layer_types` .*sliding_attention"),
    ({"num_key_value_heads": 5}, r"multiple of `num_key_value_heads`, got 32 and 5"),
    (
        {"num_attention_heads": 30, "num_key_value_heads": 30},
        r"`hidden_size` must be a multiple .*4096 and 30",
    ),
    ({"head_dim": 63}, r"`head_dim` must be even .*63"),
    ({"num_hidden_layers": 0}, r"`num_hidden_layers` must be from 1 to 4096, got 0"),
    ({"vocab_size": "32000"}, r"`vocab_size` must be an integer, got '32000'"),
    ({"rms_norm_eps": 0.0}, r"`rms_norm_eps` must be from 1e-30 to 1, got 0.0"),
    ({"tie_word_embeddings": "yes"}, r"`tie_word_embeddings` must be true or false, got 'yes'"),
    ({"eos_token_id": "</s>"}, r"`eos_token_id` must be a token id .*'</s>'"),
    ({"rope_theta": 0}, r"`rope_theta` must be a number above 1, got 0"),
    ({"rope_scaling": YARN}, r"`rope_scaling`: `rope_type` must be one of 'default', 'linear', 'llama3', got 'yarn'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"`rope_scaling`: `type` .*'dynamic'"),
    ({"rope_scaling": {"rope_type": "linear"}}, r"`rope_scaling`: `factor` is missing"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"`rope_scaling`: `low_freq_factor` is missing"),
    (
        {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}},
        r"`high_freq_factor` must exceed the `low_freq_factor` 1, got 1.0",
    ),
    (
        {"rope_scaling": LLAMA3_ROPE | {"attention_factor": 2}},
        r"`rope_scaling`: `attention_factor` is not supported for 'llama3', got 2",
    ),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        r"`rope_parameters`: `partial_rotary_factor` must be 1, got 0.25",
    ),
    ({"rope_parameters": YARN, "rope_scaling": LLAMA3_ROPE}, r"`rope_scaling` contradicts `rope_parameters`"),
    (
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4},
        r"`rope_theta` contradicts the 500000.0 among .*got 10000.0",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refuses_what_it_would_compute_wrongly(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hugging_face(LLAMA2 | change)


@pytest.mark.parametrize(
    "name",
    ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"],
)
def test_a_missing_field_is_named(name):
    fields = {key: value for key, value in LLAMA2.items() if key != name}
    with pytest.raises(ValueError, match=f"`{name}` is missing"):
        config_from_hugging_face(fields)


def test_a_mistral_without_a_word_on_its_window_has_one():
    fields = {name: value for name, value in MISTRAL.items() if name != "sliding_window"}
    with pytest.raises(ValueError, match=r"`sliding_window` must be None, got 4096"):
        config_from_hugging_face(fields)


def test_a_mistral_must_name_its_key_value_heads():
    fields = {name: value for name, value in MISTRAL.items() if name != "num_key_value_heads"}
    with pytest.raises(ValueError, match="`num_key_value_heads` is missing"):
        config_from_hugging_face(fields)
