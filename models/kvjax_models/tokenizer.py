"""Text to token ids and back, and chats to text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsInt

from kvjax.files import reading
from kvjax_models.chat_template import render_chat
from kvjax_models.tokenizer_repair import drop_batch_settings

# Arguments of transformers' `apply_chat_template` that are none of the template's variables.
_NOT_VARIABLES = (
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)


class Tokenizer:
    """A checkpoint's tokenizer, over the PyPI package `tokenizers`.

    Every text becomes all of its tokens, the same each time: what a file stored of an earlier program's batches
    (truncation, padding) and of its training (dropout of merges) never acts. Decoded texts keep their spaces:
    `clean_up_tokenization_spaces` is for word pieces, and transformers passes over it in BPE, too.

    Attributes:
        backend: the `tokenizers.Tokenizer`; its truncation, padding and dropout are switched off.
        chat_template: the Jinja source, or None.
        named_templates: Jinja sources for other uses, such as "tool_use".
        special_tokens: the texts of `bos_token`, `eos_token`, `pad_token`, `unk_token` and other named tokens.
        source: the file that it comes from, for messages.
        template_source: the file that its chat templates come from, for messages.
    """

    def __init__(
        self,
        backend: Any,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        named_templates: Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        source: str = "The tokenizer",
        template_source: str = "The chat template",
    ):
        drop_batch_settings(backend)
        self.backend = backend
        self.chat_template = chat_template
        self.named_templates = dict(named_templates or {})
        named = {"bos_token": bos_token, "eos_token": eos_token, **(special_tokens or {})}
        self.special_tokens = {name: token for name, token in named.items() if token is not None}
        self.source, self.template_source = source, template_source

    @property
    def bos_token(self) -> str | None:
        """The text of the token that begins a text, or None."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends an answer, or None."""
        return self.special_tokens.get("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Special tokens written out in the text ("<|im_start|>") become their ids, as Hugging Face does.

        Args:
            text: any text.
            add_special_tokens: add what the checkpoint puts around a text, mostly the token that begins it.
                Pass False for the output of `apply_chat_template`: templates write that token themselves.

        Raises:
            ValueError: `text` is no string, or holds half of a surrogate pair, which is no character.
        """
        _check_text(text)
        with reading(self.source, what="a tokenizer that can encode this text"):
            return self.backend.encode(text, add_special_tokens=bool(add_special_tokens)).ids

    def decode(self, ids: Iterable[SupportsInt], skip_special_tokens: bool = True) -> str:
        """The text of token ids; NumPy's and JAX's integers are taken too.

        Raises:
            ValueError: an id is negative, or over 32 bits.
        """
        ids = [int(token) for token in ids]
        wrong = next((token for token in ids if not 0 <= token < 1 << 32), None)
        if wrong is not None:
            raise ValueError(f"`ids` must be token ids, got {wrong}.")
        with reading(self.source, what="a tokenizer that can decode these ids"):
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a chat, to be encoded with `add_special_tokens=False`.

        It is the text that transformers 5.24 renders. The same arguments give the same text, unless the template
        writes the date or draws lots.

        Args:
            messages: {"role": ..., "content": ...}, oldest first.
            add_generation_prompt: end with what begins an answer.
            chat_template: the name of one of the templates, or a Jinja source. None: the default one, or "tool_use"
                with tools where there is one.
            **variables: more for the template: `tools` and `documents` (lists of dictionaries), or what only this
                one knows, such as `enable_thinking`.

        Raises:
            ValueError: the checkpoint has no chat template, or `messages` are not what it takes.
        """
        for name in _NOT_VARIABLES:
            if variables.pop(name, None):
                raise ValueError(f"`{name}` is not taken here: the whole text of `messages` is returned, unencoded.")
        for name in ("tools", "documents"):
            _check_objects(variables.get(name), name)
        template, source = self._template(chat_template, tools=variables.get("tools"))
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
            variables=variables,
            source=source,
        )

    def _template(self, wanted: str | None, *, tools: Any) -> tuple[str, str]:
        """The Jinja source of a template, and its name for messages."""
        if wanted is not None and not isinstance(wanted, str):
            raise ValueError(f"`chat_template` must be a name or a Jinja source, got {wanted!r}.")
        if wanted is None and tools is not None and "tool_use" in self.named_templates:
            wanted = "tool_use"
        if wanted in self.named_templates:
            return self.named_templates[wanted], f"{self.template_source} ({wanted!r})"
        if wanted is not None and not (wanted == "default" and self.chat_template is not None):
            return wanted, "`chat_template`"
        if self.chat_template is None:
            raise ValueError("This checkpoint has no chat template: build the prompt's text yourself.")
        return self.chat_template, self.template_source

    def __repr__(self) -> str:
        template = "a" if self.chat_template else "no"
        return f"Tokenizer({self.backend.get_vocab_size()} tokens, {template} chat template)"


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"`text` must be a string, got {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"`text` must be text that UTF-8 can write, got the lone surrogate {text[error.start]!r} "
            f"at character {error.start}."
        ) from None


def _check_objects(value: object, name: str) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"`{name}` must be a list of dictionaries, got {value!r}.")
