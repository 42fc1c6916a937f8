"""Which fields of a config.json leave the arithmetic of a Llama as it is.

Models with other layers often keep the name "llama" and add fields: RoPE in some layers only, multipliers, caps,
norms of queries and keys, experts. A field that is neither read nor listed here is refused, unless it says "none".
"""

from typing import Any

from kvjax.fields import Fields

# What `hugging_face_config` and `hugging_face_rope` read.
_READ = """
    model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta rope_scaling rope_parameters
    original_max_position_embeddings tie_word_embeddings attention_bias mlp_bias eos_token_id bos_token_id
"""

# What transformers' configurations have of every model, 2 to 5, and what trainers and converters add. `auto_map` names
# code beside the checkpoint; transformers runs its own Llama too, unless it is told to trust that code.
# `pretraining_tp` above 1 has transformers 4 add the parts of products in another order.
_HARMLESS = """
    _name_or_path name_or_path _commit_hash transformers_version torch_dtype dtype use_bfloat16 _pre_quantization_dtype
    auto_map custom_pipelines tokenizer_class tokenizer_model_max_length tokenizer_padding_side padding_side
    transformers.js_config is_llama_config keys_to_ignore_at_inference license model_name
    use_cache cache_implementation return_dict use_return_dict return_dict_in_generate output_attentions
    output_hidden_states output_scores _output_attentions output_logits torchscript tf_legacy_loss
    chunk_size_feed_forward is_decoder pretraining_tp attn_implementation use_flash_attention use_flash_attention_2
    use_flash_attn flash_attention _flash_attn_2_enabled _experts_implementation _experts_implementation_internal
    initializer_range initializer_factor init_std attention_dropout hidden_dropout hidden_dropout_prob dropout
    attention_probs_dropout_prob attention_dropout_prob attn_pdrop resid_pdrop embd_pdrop embed_dropout
    classifier_dropout neftune_noise_alpha gradient_checkpointing use_gradient_checkpointing
    use_reentrant_checkpointing
    max_sequence_length max_seq_len max_seq_length seq_length model_max_length n_ctx max_window_layers
    pad_token_id sep_token_id unk_token_id cls_token_id mask_token_id decoder_start_token_id pad_token bos_token
    eos_token unk_token forced_bos_token_id forced_eos_token_id
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p min_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
_HARMLESS_PREFIXES = ("unsloth_", "_attn_implementation")

_KNOWN = frozenset(_READ.split()) | frozenset(_HARMLESS.split())

# Field: the only values, beside null, under which the model is the plain Llama that is built here.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "activation": ("silu", "swiglu"),
    "activation_function": ("silu", "swiglu"),
    "sliding_window": (),
    "partial_rotary_factor": (1, 1.0),
    "rotary_pct": (1, 1.0),
    "position_embedding_type": ("rope", "rotary"),
    "use_rope": (True,),
    "is_causal": (True,),
    # Not even 1: it stands in the place of 1 / sqrt(head_dim).
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "tie_encoder_decoder": (False,),
}
# Lists with one entry for each layer: that of a plain Llama's.
_LAYERS = {"layer_types": "full_attention", "mlp_layer_types": "dense", "no_rope_layers": 1}
# What a name ends like whose neutral value is 1; 0 would be another model.
_MULTIPLIERS = ("_multiplier", "_scale", "_scaling", "_factor", "_scalar", "_temperature")


def check_plain_llama(fields: Fields) -> None:
    """Raises a ValueError that names a field under which the model is more than a plain Llama."""
    for name in fields.values:
        value = fields.take(name, None)
        if value is None or name in _KNOWN or name.startswith(_HARMLESS_PREFIXES):
            continue
        if name in _ONLY:
            if not _is_one(value, _ONLY[name]):
                fields.fail(name, f"must be {' or '.join(map(repr, _ONLY[name])) or None}")
        elif name in _LAYERS:
            if not isinstance(value, list) or not all(_is_one(layer, (_LAYERS[name],)) for layer in value):
                fields.fail(name, f"must all be {_LAYERS[name]!r}")
        elif not _is_one(value, (1, 1.0) if name.endswith(_MULTIPLIERS) else (False, 0, 0.0, "", [], {})):
            fields.fail(name, "is no field of a plain Llama; remove it if the model computes as one without it")


def _is_one(value: Any, choices: tuple[Any, ...]) -> bool:
    # `True == 1` holds in Python.
    return any(type(value) is type(choice) and value == choice for choice in choices)
