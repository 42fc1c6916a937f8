"""Prompts and answers over one growing cache."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import kvjax
from kvjax.cli.errors import UserError
from kvjax.cli.progress import activity

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


class Conversation:
    """A model, what was said, and the cache that remembers it.

    Args:
        loaded: the model.
        policy: keeps its cache.
        system: what the chat begins with, or None.
        raw: prompts are plain text: no chat template.
        settings: further arguments of `kvjax.generate`.
        note: is told what the user should know.

    Raises:
        UserError: the model has no tokenizer, or no chat template where one is needed.
    """

    def __init__(
        self,
        loaded: "kvjax_models.Loaded",
        *,
        policy: "kvjax.Policy",
        system: str | None,
        raw: bool,
        settings: dict[str, Any],
        note: Callable[[str], None],
    ):
        self.plain = takes_plain_text(loaded, raw=raw, system=system)
        assert loaded.tokenizer is not None
        self._model, self._tokenizer = loaded.params, loaded.tokenizer
        self._policy, self._settings, self._note = policy, settings, note
        self._messages = first_messages(system)
        self._cache: kvjax.Cache | None = None
        #: The text whose tokens the cache has seen.
        self._cached_text = ""

    def answer(self, prompt: str, *, show: Callable[[str], None]) -> Answer:
        """Answers the next prompt.

        Interrupted, it remembers what it had said until then.

        Args:
            prompt: what the user says.
            show: gets each piece of the answer as it comes.
        """
        if self.plain:
            return self._generate(self._tokenizer.encode(prompt), show)
        self._messages.append({"role": "user", "content": prompt})
        text = self._tokenizer.apply_chat_template(self._messages)
        said: list[str] = []

        def remember_and_show(piece: str) -> None:
            said.append(piece)
            show(piece)

        try:
            answer = self._generate(self._unseen(text), remember_and_show)
        except KeyboardInterrupt:
            # The cache is still that of the turn before: the next turn reads this one's text too.
            self._messages.append({"role": "assistant", "content": "".join(said)})
            raise
        tokens = answer.result.tokens[0, : answer.result.lengths[0]].tolist()
        self._cache = answer.result.cache
        self._cached_text = text + self._tokenizer.decode(tokens, skip_special_tokens=False)
        # With a stop string, if there was one: the cache has seen it.
        content = self._tokenizer.decode(tokens, skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": content})
        return answer

    def _unseen(self, text: str) -> list[int]:
        """The tokens of `text` that the cache has not seen; all, and no cache, where it is not a continuation."""
        if not text.startswith(self._cached_text):
            self._note("the chat template has rewritten earlier turns: reading the whole conversation anew")
            self._cache, self._cached_text = None, ""
        return self._tokenizer.encode(text.removeprefix(self._cached_text), add_special_tokens=False)

    def _generate(self, tokens: list[int], show: Callable[[str], None]) -> Answer:
        times: list[float] = []
        with activity(f"Reading {len(tokens)} tokens") as end_activity:

            def take(new: kvjax.NewToken) -> None:
                times.append(time.perf_counter())
                end_activity()
                assert new.texts is not None
                show(new.texts[0])

            started = time.perf_counter()
            result = kvjax.generate(
                self._model,
                tokens,
                policy=self._policy,
                tokenizer=self._tokenizer,
                cache=self._cache,
                callback=take,
                **self._settings,
            )
        duration = times[-1] - times[0]
        return Answer(
            result=result,
            first_token_seconds=times[0] - started,
            tokens_per_second=(len(times) - 1) / duration if duration > 0 else None,
        )
