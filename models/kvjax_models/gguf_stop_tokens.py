"""Finds the tokens of a GGUF file that end an answer, though no key of the file says so."""

from collections.abc import Mapping
from typing import Any

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's types of tokens that stand for themselves in a text
# What models that answer in turns call the token that ends a turn, a message or a document.
_NAMES = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),  # Llama 3
        *("<|eot|>", "<|eom|>", "</s>", "<EOT>", "_<EOT>"),  # Llama 4, 2 and Code Llama
        *("<|im_end|>", "<|endoftext|>", "<|end_of_turn|>"),  # ChatML and its kin
        *("<|end|>", "<end_of_turn>", "<eos>", "<turn|>", "<end_of_utterance>", "[EOT]", "[EOS]"),  # Phi, Gemma, others
    }
)


def end_of_turn_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of the tokens that end a turn by what they are called, as llama.cpp finds them.

    Unlike there, only control and user-defined tokens count, not a word of the vocabulary that is spelled so. Nor do
    tokens for filling in the middle of code, and the one that the file has for unknown text: SmolLM2 calls that
    "<|endoftext|>", and its own settings do not stop there.
    """
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list):
        return []
    return [
        number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and token in _NAMES and number != unknown
    ]
