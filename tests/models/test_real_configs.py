"""config.json files as models on the hub have them, and those of other models that call themselves llama."""

import pytest

from kvjax_models.hugging_face_config import config_from_hugging_face

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
LLAMA1 = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 2048,
    "max_sequence_length": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "pad_token_id": 0, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.28.0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": True,
    "vocab_size": 32768,
}  # fmt: skip
UNCHANGED = {
    "_name_or_path": "/data/model", "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "decoder_start_token_id": None,
    "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None, "finetuning_task": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "prefix": None,
    "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0,
    "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None,
    "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
NEW_ROPE = {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}, "rope_scaling": None, "rope_theta": None}
REAL = {
    "SmolLM2": SMOLLM2,
    "LLaMA 1 and Vicuna 1.1": LLAMA1,
    "LLaMA 1, as its first converter wrote it": LLAMA1 | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": -1},
    "Vicuna 1.5 16k": LLAMA1 | {"max_position_embeddings": 4096, "max_sequence_length": 16384, "rms_norm_eps": 1e-05,
                                "rope_scaling": {"factor": 4.0, "type": "linear"}, "num_key_value_heads": 32},
    "Llama 2 70B": LLAMA1 | {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
                             "pretraining_tp": 4},
    "a 7B of 32K with code of its own": LLAMA1 | {"rope_scaling": {"factor": 8.0, "type": "linear"}, "auto_map": {
        "AutoModelForCausalLM": "togethercomputer/LLaMA-2-7B-32K--modeling_flash_llama.LlamaForCausalLM"}},
    "TinyLlama": LLAMA1 | {"num_key_value_heads": 4, "hidden_size": 2048, "intermediate_size": 5632,
                           "num_hidden_layers": 22, "pretraining_tp": 1, "rope_scaling": None},
    "Yi 34B 200K": LLAMA1 | {"hidden_size": 7168, "num_attention_heads": 56, "num_key_value_heads": 8,
                             "rope_theta": 10000000.0, "vocab_size": 64000, "max_position_embeddings": 200000},
    "DeepSeek coder": LLAMA1 | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000,
                                "bos_token_id": 32013, "eos_token_id": 32014, "vocab_size": 32256,
                                "attention_bias": False},
    "Llama 3.1": LLAMA31,
    "Llama 3.1, transformers 5": LLAMA31 | NEW_ROPE | {"torch_dtype": None, "dtype": "bfloat16", "head_dim": 128,
                                                       "transformers_version": "5.0.0"},
    "Llama 3.1, unsloth": LLAMA31 | {"unsloth_fixed": True, "unsloth_version": "2024.9", "pad_token_id": 128004},
    "DeepSeek R1 distilled": LLAMA31 | {"_attn_implementation_autoset": True, "eos_token_id": 128001},
    "a classifier's leftovers": LLAMA31 | UNCHANGED,
    "another trainer's": SMOLLM2 | {"neftune_noise_alpha": 0.0, "use_resampler": False, "qk_layer_norms": False,
                                    "_flash_attn_2_enabled": True, "num_experts": 0, "residual_multiplier": 1.0},
    "Falcon 3": LLAMA31 | {"activation": "swiglu", "head_dim": 256, "rope_theta": 1000042, "rope_scaling": None},
    "Mistral 0.3": MISTRAL,
    "Mistral Nemo": MISTRAL | {"head_dim": 128, "hidden_size": 5120, "vocab_size": 131072, "num_hidden_layers": 40},
}  # fmt: skip


@pytest.mark.parametrize("fields", REAL.values(), ids=REAL.keys())
def test_a_real_configuration_is_read(fields):
    config = config_from_hugging_face(fields)
    assert config.vocab_size == fields["vocab_size"]
    assert config.num_key_value_heads == fields.get("num_key_value_heads", fields["num_attention_heads"])


PER_LAYER = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
OTHER_MODELS = {
    "no_rope_layers": [1, 1, 1, 0],
    "no_rope_layer_interval": 4,
    "attention_multiplier": 1.0,
    "query_pre_attn_scalar": 256,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "logit_scale": 0.0625,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "clip_qkv": 8.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_sinks": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 4096,
    "use_sliding_window": True,
    "sliding_window_pattern": 6,
    "_sliding_window_pattern": 6,
    "attention_chunk_size": 8192,
    "rope_parameters": PER_LAYER,
    "rope_local_base_freq": 10000.0,
    "rope_interleaved": True,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.25,
    "position_embedding_type": "alibi",
    "alibi": True,
    "use_rope": False,
    "num_experts": 8,
    "num_local_experts": 8,
    "moe_layers": [1],
    "num_nextn_predict_layers": 1,
    "headwise_attn_output_gate": True,
    "swiglu_limit": 7.0,
    "norm_type": "layernorm",
    "parallel_residual": True,
    "is_encoder_decoder": True,
    "add_cross_attention": True,
    "pruned_heads": {"0": [1]},
    "per_layer_config": {"0": {"intermediate_size": 4}},
    "quantization": {"group_size": 64, "bits": 4},
    "compression_config": {"format": "pack-quantized"},
    "quantization_config": {"quant_method": "gptq"},
    "hidden_activation": "gelu_pytorch_tanh",
    "is_causal": False,
    "mup": True,
    "a field of tomorrow": 3,
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_a_field_that_changes_the_forward_pass_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"config.json: `{name}`.*, got "):
        config_from_hugging_face(SMOLLM2 | {"rope_theta": 10000.0, name: OTHER_MODELS[name]})


DAMAGED = [
    ("rope_theta", float("inf"), "must be finite, got inf"),
    ("rope_theta", 1e-320, "must be a number above 1, got 1e-320"),
    ("rope_theta", True, "must be a number, got True"),
    ("rope_theta", 10**400, "must be finite, got 1000"),
    ("rope_theta", "10000", "must be a number, got '10000'"),
    ("rms_norm_eps", float("nan"), "must be finite, got nan"),
    ("rms_norm_eps", 1e-320, "must be from 1e-30 to 1, got 1e-320"),
    ("rms_norm_eps", True, "must be a number, got True"),
    ("max_position_embeddings", 10**30, "must be from 1 to 2147483647, got 1000"),
    ("num_attention_heads", 0, "must be from 1 to 4096, got 0"),
    ("num_attention_heads", [9], r"must be an integer, got \[9\]"),
    ("num_key_value_heads", True, "must be an integer, got True"),
    ("num_hidden_layers", 10**9, "must be from 1 to 4096, got 1000000000"),
    ("hidden_size", 10**9, "must be from 1 to 1048576, got 1000000000"),
    ("head_dim", 2.0, "must be an integer, got 2.0"),
    ("eos_token_id", 49152, "must be in the vocabulary of 49152 tokens, got 49152"),
    ("eos_token_id", [2, -1], r"must be in the vocabulary of 49152 tokens, got \[2, -1\]"),
    ("eos_token_id", True, "must be a token id or a list of them, got True"),
    ("eos_token_id", 2.0, "must be a token id or a list of them, got 2.0"),
    ("eos_token_id", [[2]], r"must be a token id or a list of them, got \[\[2\]\]"),
    ("bos_token_id", 49152, "must be from 0 to 49151, got 49152"),
    ("model_type", ["llama"], r"must be one of 'llama', 'mistral', got \['llama'\]"),
    ("architectures", {"a": 1}, r"must be \['LlamaForCausalLM'\], got \{'a': 1\}"),
    ("rope_scaling", [1], r"must be an object, got \[1\]"),
    ("rope_scaling", {"type": "linear", "factor": True}, "`factor` must be a number, got True"),
    ("rope_scaling", {"type": "linear", "factor": float("inf")}, "`factor` must be finite, got inf"),
    ("rope_scaling", {"type": "linear", "factor": -2.0}, r"`factor` must be from 1 to 1e\+06, got -2.0"),
    ("rope_scaling", {"type": "linear", "rope_type": "default"}, "`type` contradicts the `rope_type` 'default'"),
    ("rope_scaling", LLAMA3_ROPE | {"original_max_position_embeddings": 0}, "must be from 1 to 2147483647, got 0"),
]


@pytest.mark.parametrize(("name", "value", "message"), DAMAGED)
def test_a_damaged_field_is_named_with_what_came(name, value, message):
    with pytest.raises(ValueError, match=rf"config.json: `{name}`.*{message}"):
        config_from_hugging_face(SMOLLM2 | {name: value})


@pytest.mark.parametrize("value", [49152, True, 2.0, "2"])
def test_a_damaged_end_token_for_generation_is_named_with_its_file(value):
    with pytest.raises(ValueError, match=r"generation_config.json: `eos_token_id` must be"):
        config_from_hugging_face(SMOLLM2, {"eos_token_id": value})
