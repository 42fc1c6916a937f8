"""Text to token ids and back, and chats to text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsInt

from kvjax_models.chat_template import render_chat


class Tokenizer:
    """A checkpoint's tokenizer, over the PyPI package `tokenizers`.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        chat_template: the Jinja source, or None.
        bos_token: the text of the token that begins a text, or None.
        eos_token: the text of the token that ends an answer, or None.
    """

    def __init__(
        self,
        backend: Any,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ):
        self.backend = backend
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Special tokens written out in the text ("<|im_start|>") become their ids, as Hugging Face does.

        Args:
            text: any text.
            add_special_tokens: add what the checkpoint puts around a text, mostly the token that begins it.
                Pass False for the output of `apply_chat_template`: templates write that token themselves.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[SupportsInt], skip_special_tokens: bool = True) -> str:
        """The text of token ids; NumPy's and JAX's integers are taken too."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a chat, to be encoded with `add_special_tokens=False`.

        Args:
            messages: {"role": ..., "content": ...}, oldest first.
            add_generation_prompt: end with what begins an answer.

        Raises:
            ValueError: the checkpoint has no chat template, or `messages` are not what it takes.
        """
        if self.chat_template is None:
            raise ValueError("This checkpoint has no chat template: build the prompt's text yourself.")
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return render_chat(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens={name: token for name, token in tokens.items() if token is not None},
        )

    def __repr__(self) -> str:
        template = "a" if self.chat_template else "no"
        return f"Tokenizer({self.backend.get_vocab_size()} tokens, {template} chat template)"
