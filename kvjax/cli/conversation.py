"""Answers as they are shown: what the prompt is in tokens, and when the first one came."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import kvjax
from kvjax.cli.errors import UserError
from kvjax.cli.progress import activity
from kvjax.compiling import Compilation

if TYPE_CHECKING:
    import kvjax_models


class Answer(NamedTuple):
    """An answer and when it came.

    Attributes:
        result: what `kvjax.generate` gave.
        first_token_seconds: from the prompt to the first token, compilation included.
        tokens_per_second: of the tokens after the first; None where there are none.
    """

    result: "kvjax.Result"
    first_token_seconds: float
    tokens_per_second: float | None


def takes_plain_text(loaded: "kvjax_models.Loaded", *, raw: bool, system: str | None) -> bool:
    """Whether prompts go to the model as they are, without a chat template.

    Raises:
        UserError: the model has no tokenizer, or no chat template where one is needed.
    """
    if loaded.tokenizer is None:
        raise UserError("the checkpoint has no tokenizer, and text needs one.")
    plain = raw or loaded.chat_template is None
    if plain and system is not None:
        raise UserError("--system needs a chat template, and the checkpoint has none.")
    return plain


def first_messages(system: str | None) -> list[dict[str, str]]:
    """What a chat begins with."""
    return [] if system is None else [{"role": "system", "content": system}]


def prompt_ids(loaded: "kvjax_models.Loaded", prompt: str, *, plain: bool, system: str | None) -> list[int]:
    """The ids of one prompt, by the chat template unless it is plain."""
    assert loaded.tokenizer is not None
    if plain:
        return loaded.tokenizer.encode(prompt)
    text = loaded.tokenizer.apply_chat_template([*first_messages(system), {"role": "user", "content": prompt}])
    return loaded.tokenizer.encode(text, add_special_tokens=False)


def timed(
    run: Callable[[Callable[["kvjax.NewToken"], None]], "kvjax.Result"], *, waiting: str, show: Callable[[str], None]
) -> Answer:
    """Runs what answers, shows the text as it comes, and measures it.

    Args:
        run: answers, and tells a callback of every step.
        waiting: what it does until the first token comes, "Reading"; while it compiles, that is said.
        show: gets each piece of the answer as it comes.
    """
    times: list[float] = []
    with activity(waiting) as shown:

        def take(new: kvjax.NewToken) -> None:
            times.append(time.perf_counter())
            shown.end()
            assert new.texts is not None
            show(new.texts[0])

        started = time.perf_counter()
        with Compilation(lambda begins: shown.describe(f"{waiting}: compiling for this length" if begins else waiting)):
            result = run(take)
    duration = times[-1] - times[0]
    return Answer(
        result=result,
        first_token_seconds=times[0] - started,
        tokens_per_second=(len(times) - 1) / duration if duration > 0 else None,
    )
