"""Examples as token ids, in the pieces that are compressed one after another, and examples of an asked length."""

from typing import NamedTuple

from kvjax.conversation import chat_text
from kvjax.evaluation.task import Example, Task
from kvjax.prompts import Tokenizer

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


class PromptParts(NamedTuple):
    """A prompt in pieces. They are tokenised one by one, so that whatever is compressed, the tokens are the same.

    Attributes:
        context: from the start to where the long text ends.
        question: from there to where the first answer begins.
        later: what comes after it: the first answer, and the next question up to where its answer begins. Empty
            where there is one question.
        answer_tokens: tokens that the last answer may have: half as many again as the right one has, and four.
    """

    context: list[int]
    question: list[int]
    later: list[int]
    answer_tokens: int

    @property
    def length(self) -> int:
        """Tokens of all pieces."""
        return len(self.context) + len(self.question) + len(self.later)


def prompt_parts(example: Example, tokenizer: Tokenizer) -> PromptParts:
    """The prompt of an example, by the chat template if there is one.

    Raises:
        ValueError: the chat template does not continue a chat where it ended, or changes the text in it.
    """
    assert 1 <= len(example.turns) <= 2, "the pieces are for one or two turns"
    text, until_first = _texts(example, tokenizer)
    before, mark, after = text.partition(_MARK)
    head, _, _ = until_first.partition(_MARK)
    question = until_first.removeprefix(f"{head}{_MARK}")
    if not mark or before != head or not after.startswith(question):
        raise ValueError("`tokenizer` has a chat template that rewrites earlier turns; tasks need one that goes on.")
    templated = _has_template(tokenizer)
    later = after.removeprefix(question)
    last = example.turns[-1]
    right = len(tokenizer.encode(last.reference, add_special_tokens=False))
    return PromptParts(
        context=tokenizer.encode(before, add_special_tokens=not templated),
        question=tokenizer.encode(question, add_special_tokens=False),
        later=tokenizer.encode(later, add_special_tokens=False) if later else [],
        answer_tokens=right + right // 2 + 4,
    )


def _texts(example: Example, tokenizer: Tokenizer) -> tuple[str, str]:
    """The whole prompt, and its part up to where the first answer begins; a mark stands behind the context."""
    first = example.turns[0]
    asked = f"{example.context}{_MARK}\n\n{first.question}"
    if not _has_template(tokenizer):
        text = until_first = f"{asked} {first.prefix}"
        for before, turn in zip(example.turns, example.turns[1:], strict=False):
            text += f"{before.reference}\n\n{turn.question} {turn.prefix}"
        return text, until_first
    messages = [{"role": "user", "content": asked}]
    text = until_first = chat_text(messages, tokenizer) + first.prefix
    for before, turn in zip(example.turns, example.turns[1:], strict=False):
        messages.append({"role": "assistant", "content": before.prefix + before.reference})
        messages.append({"role": "user", "content": turn.question})
        text = chat_text(messages, tokenizer) + turn.prefix
    return text, until_first


def _has_template(tokenizer: Tokenizer) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def fitted(task: Task, tokenizer: Tokenizer, *, length: int, depth: float, seed: int) -> tuple[Example, PromptParts]:
    """The longest example of a task whose prompt has at most `length` tokens, chat template and all.

    Raises:
        ValueError: not even one without filler does.
    """

    def made(filler: int) -> tuple[Example, PromptParts]:
        example = task.example(filler, depth=depth, seed=seed)
        return example, prompt_parts(example, tokenizer)

    shortest = made(0)
    if shortest[1].length > length:
        raise ValueError(
            f"`lengths` must be at least {shortest[1].length} tokens for the task {task.name!r}, got {length}."
        )
    # One piece of filler is mostly between 2 and 20 tokens; lengths rise with it, but for a token here and there.
    low, high = 0, max((length - shortest[1].length) // 8, 1)
    while made(high)[1].length <= length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if made(middle)[1].length <= length else (low, middle)
    return made(low)
