"""Renders chat templates as transformers 5.24 does: the same variables, functions and text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax_models.template_process import PROCESS

# Names under which a message's reasoning comes; templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: str,
    messages: Any,
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any] | None = None,
    source: str = "The chat template",
) -> str:
    """The text of a chat.

    A template runs in a process of its own (see `template_process`), for half a second of processor time, in 256 MiB,
    and may make 16 million characters; messages of megabytes have it all in proportion.

    Args:
        template: the Jinja source.
        messages: {"role": ..., "content": ...}, oldest first; checked here, for they often come from outside.
        add_generation_prompt: end with what begins an answer.
        special_tokens: the template's variables `bos_token`, `eos_token` and their kind.
        variables: more of the template's variables, such as `tools`; they win over special tokens.
        source: where the template is from, for messages.

    Raises:
        ValueError: `messages` are malformed, or the template is, refuses them, or makes too much of them.
    """
    _check_messages(messages)
    values = {"tools": None, "documents": None, **special_tokens, **(variables or {})}
    values = {name: _plain(value, name) for name, value in values.items()}
    values["messages"] = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    values["add_generation_prompt"] = bool(add_generation_prompt)
    try:
        return PROCESS.render(template, values)
    except ValueError as error:
        raise ValueError(f"{source} does not take these `messages`: {error}") from error


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"`messages` must be a list of one message or more, got {messages!r}.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"`messages[{index}]` must be a dictionary, got {message!r}.")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"`messages[{index}]` must have a string under 'role', got {message!r}.")
        content = message.get("content")
        parts = isinstance(content, list | tuple) and all(isinstance(part, Mapping | str) for part in content)
        calls = content is None and message.get("tool_calls")
        if not (isinstance(content, str) or parts or calls):
            raise ValueError(
                f"`messages[{index}]` must have a string under 'content', or a list of parts, or no content beside "
                f"'tool_calls', got {message!r}."
            )


def _message(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A message as templates get it: without what is None, and with its reasoning under the names they know."""
    plain = {key: value for key, value in _plain(message, name).items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """A value made of Python's own types; other objects, such as images, become the names of their types."""
    if depth > 100:
        raise ValueError(f"`{name}` must not be nested over 100 deep.")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    if isinstance(value, np.generic):
        return _plain(value.item(), name, depth + 1)
    if isinstance(value, Mapping):
        return {_plain(key, name, depth + 1): _plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = (_plain(item, name, depth + 1) for item in value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    return f"<{type(value).__name__}>"
