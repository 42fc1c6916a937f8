"""Renders chat templates as Hugging Face does: Jinja in a sandbox."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kvjax.extras import extra


def render_chat(
    template: str,
    messages: Any,
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
) -> str:
    """The text of a chat.

    Args:
        template: the Jinja source.
        messages: {"role": ..., "content": ...}, oldest first; checked here, for they often come from outside.
        add_generation_prompt: end with what begins an answer.
        special_tokens: the template's variables `bos_token` and `eos_token`.

    Raises:
        ValueError: `messages` are malformed, or the template is or refuses them.
    """
    _check_messages(messages)
    with extra("text", purpose="Rendering a chat template"):
        import jinja2
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"The chat template does not take these `messages`: {error}") from error


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"`messages` must be a list of one message or more, got {messages!r}.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"`messages[{index}]` must be a dictionary, got {message!r}.")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"`messages[{index}]` must have a string under {key!r}, got {message!r}.")


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own filter escapes HTML.


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
