"""Llama-family models in Flax NNX, and their checkpoints: safetensors, GGUF and Orbax."""

from kvjax_models.config import LlamaConfig
from kvjax_models.describing import Description, describe
from kvjax_models.embedded import embedded_model
from kvjax_models.known_models import KNOWN_MODELS
from kvjax_models.llama import Llama
from kvjax_models.loading import Loaded, load, save
from kvjax_models.sizes import model_size, model_spec
from kvjax_models.tokenizer import Tokenizer

__all__ = [
    "KNOWN_MODELS",
    "Description",
    "Llama",
    "LlamaConfig",
    "Loaded",
    "Tokenizer",
    "describe",
    "embedded_model",
    "load",
    "model_size",
    "model_spec",
    "save",
]
