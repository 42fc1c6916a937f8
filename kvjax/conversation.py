"""Chats as token ids, and turns that go on behind an answer that is in a cache already."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax.tokenizing import Tokenizer, encoded, is_special, token_text

Message = Mapping[str, Any]

# A chat before the one that is continued, where that is not known. No template trims or rewrites such words.
_BEFORE = [{"role": "user", "content": "question"}]
_ANSWER = "kvjaxanswer"


class RewritesTurnsError(ValueError):
    """A chat template writes earlier turns in another way once there are later ones."""


def chat_text(messages: Sequence[Message], tokenizer: Tokenizer | None) -> str:
    """The text of a chat, up to where an answer begins, by the tokenizer's chat template.

    Raises:
        ValueError: `tokenizer` is None or has no chat template, or a message has no role.
    """
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f'a chat\'s messages must be {{"role": ..., "content": ...}}, got {message!r}.')
    render = getattr(tokenizer, "apply_chat_template", None)
    if tokenizer is None or render is None or getattr(tokenizer, "chat_template", "") is None:
        raise ValueError("a chat needs a `tokenizer` with a chat template, got none.")
    # Hugging Face's tokenizers give ids unless told otherwise.
    as_text = {"tokenize": False} if hasattr(tokenizer, "convert_ids_to_tokens") else {}
    return render(list(messages), add_generation_prompt=True, **as_text)


def chat_ids(messages: Sequence[Message], tokenizer: Tokenizer | None) -> np.ndarray:
    """The ids of a chat. The template writes the special tokens itself."""
    return encoded(chat_text(messages, tokenizer), tokenizer, add_special_tokens=False)


def continued_ids(
    messages: Sequence[Message],
    tokenizer: Tokenizer | None,
    *,
    last_token: int,
    stops: Sequence[int] = (),
    before: Sequence[Message] | None = None,
) -> np.ndarray:
    """The ids of new messages behind an answer: with those before them they are the ids of one conversation.

    What ends the answer in the template stands once: `last_token` is it where the answer stopped by itself, and else
    it comes first.

    Args:
        messages: the new ones.
        tokenizer: renders and encodes them.
        last_token: the newest token before them; -1 where it is not known.
        stops: tokens that end answers, beside special ones.
        before: the messages that the answer was given to; by default any, of which the template must not depend.

    Raises:
        RewritesTurnsError: the template rewrites what stood before.
        ValueError: it leaves a new message out; or `last_token` is unknown.
    """
    if last_token < 0:
        raise ValueError(
            "`cache` does not tell how its last answer ended, as one that went through `jax.jit` or `jax.tree.map`: "
            "give the turn's ids, or a text."
        )
    if any(message.get("role") == "assistant" for message in messages if isinstance(message, Mapping)):
        raise ValueError("with a `cache`, a chat must be its new messages only, got one with an assistant's.")
    rest = _behind_answer(messages, tokenizer, before=_BEFORE if before is None else before)
    assert tokenizer is not None
    ended = token_text(last_token, tokenizer)
    start = rest.find(ended)
    if not ended or start < 0 or rest[:start].strip():
        return encoded(rest, tokenizer, add_special_tokens=False)
    if last_token not in stops and not is_special(last_token, tokenizer):
        return encoded(rest, tokenizer, add_special_tokens=False)
    # Behind the token, as it stands in the whole: some tokenizers begin every text with a space.
    ids = encoded(rest[start:], tokenizer, add_special_tokens=False)
    if ids.size and ids[0] == last_token:
        return ids[1:]
    return encoded(rest[start + len(ended) :], tokenizer, add_special_tokens=False)


def _behind_answer(messages: Sequence[Message], tokenizer: Tokenizer | None, *, before: Sequence[Message]) -> str:
    """What the template writes behind an answer to `before`: the answer's end, and `messages`."""
    asked = chat_text(before, tokenizer)
    answered = [*before, {"role": "assistant", "content": _ANSWER}]
    whole = chat_text([*answered, *messages], tokenizer)
    if not whole.startswith(asked + _ANSWER):
        raise RewritesTurnsError(
            "`tokenizer` has a chat template that rewrites earlier turns, which a cache cannot follow: "
            "give the whole chat without `cache`."
        )
    rest = whole[len(asked + _ANSWER) :]
    for message in messages:
        content = message.get("content")
        # Tools' messages may be written in another way.
        if message["role"] in ("system", "user") and isinstance(content, str) and content.strip() not in rest:
            raise ValueError(
                f"`tokenizer` has a chat template that leaves out a message of the role {message['role']!r} "
                "in the middle of a chat."
            )
    return rest
