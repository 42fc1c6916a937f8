"""Llama-family models in Flax NNX, and their checkpoints: safetensors, GGUF and Orbax."""

from kvjax_models.config import LlamaConfig
from kvjax_models.embedded import embedded_model
from kvjax_models.llama import Llama
from kvjax_models.loading import Loaded, load, save
from kvjax_models.tokenizer import Tokenizer

__all__ = ["Llama", "LlamaConfig", "Loaded", "Tokenizer", "embedded_model", "load", "save"]
