"""`Chat`: a conversation over one compressed cache."""

import inspect
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, overload

import numpy as np

from kvjax.conversation import RewritesTurnsError, chat_ids, chat_text, continued_ids
from kvjax.decoding import NewToken
from kvjax.generation import Result, answering, generate, to_end
from kvjax.model import Model, check_model
from kvjax.policies.base import Policy
from kvjax.prompts import PACKAGE, check_policy
from kvjax.question import question
from kvjax.sampling import Sampling
from kvjax.state import Cache
from kvjax.statistics import Stats
from kvjax.tokenizing import Tokenizer, check_tokenizer

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
#: Arguments of `generate` that a conversation gives itself.
_OWN = ("params", "prompt", "policy", "tokenizer", "callback", "cache")


class RereadWarning(UserWarning):
    """A chat template has rewritten earlier turns, so that a cache of them is of no use."""


class Chat:
    """A conversation: every turn goes into the same cache, which the policy compresses.

        chat = kvjax.Chat(loaded.params, loaded.tokenizer, policy=kvjax.SnapKV(budget=1024), max_new_tokens=256)
        print(chat.say("What is the capital of France?").text)
        for piece in chat.say("And of Italy?", stream=True):
            print(piece, end="", flush=True)

    The cache sees the tokens that one rendering of the whole conversation would have, each once. A turn that fails, is
    interrupted, or whose stream is not read to its end leaves the conversation as it was before. Where the chat
    template rewrites earlier turns, as those do that drop a model's reasoning, the conversation is read anew, with a
    `RereadWarning`.
    """

    def __init__(
        self,
        params: Model,
        tokenizer: Tokenizer,
        *,
        policy: Policy | None = None,
        system: str | None = None,
        **settings: Any,
    ):
        """Begins a conversation; nothing is read yet.

        Args:
            params: the model.
            tokenizer: with a chat template.
            policy: which tokens stay in the cache; all by default.
            system: what the system message says, or None.
            settings: further arguments of `kvjax.generate` for every turn: `max_new_tokens`, `temperature`, ...

        Raises:
            ValueError: no chat template, or arguments that cannot be.
        """
        self._model, checked = check_model(params), check_tokenizer(tokenizer)
        self._policy = None if policy is None else check_policy(policy)
        allowed = [name for name in inspect.signature(generate).parameters if name not in _OWN]
        for name in settings:
            if name not in allowed:
                raise ValueError(f"`Chat` has no setting `{name}`: those of `generate` are {', '.join(allowed)}.")
        if system is not None and not isinstance(system, str):
            raise ValueError(f"`system` must be a text, got {system!r}.")
        self._sampling = Sampling(**{name: settings.pop(name) for name in _SAMPLING if name in settings})
        self._settings = settings
        self._messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        chat_text([*self._messages, {"role": "user", "content": "question"}], checked)
        assert checked is not None
        self._tokenizer = checked
        self._cache: Cache | None = None
        self._stats: Stats | None = None
        self._tokens = np.zeros(0, np.int32)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said, oldest first, the system message included."""
        return [dict(message) for message in self._messages]

    @property
    def cache(self) -> Cache | None:
        """What is remembered; None before the first turn."""
        return self._cache

    @property
    def stats(self) -> Stats | None:
        """What the last turn took; None before the first."""
        return self._stats

    @property
    def tokens(self) -> np.ndarray:
        """[n], the ids that the cache has seen."""
        return self._tokens.copy()

    @overload
    def say(
        self, text: str, *, stream: Literal[False] = False, callback: Callable[[NewToken], None] | None = None
    ) -> Result: ...

    @overload
    def say(self, text: str, *, stream: Literal[True]) -> Iterator[str]: ...

    def say(
        self, text: str, *, stream: bool = False, callback: Callable[[NewToken], None] | None = None
    ) -> Result | Iterator[str]:
        """Answers the user's next turn.

        Args:
            text: what the user says.
            stream: True gives the answer's pieces of text as they come, see `stream`.
            callback: gets a `NewToken` at every step.

        Returns:
            The answer, whose `text` is the last message; or an iterator of its pieces.

        Raises:
            ValueError: arguments that cannot be; see the message.
        """
        if stream and callback is not None:
            raise ValueError("`callback` and `stream` must not be given together.")
        if stream:
            return self.stream(text)
        return to_end(self._turn(text, watched=callback is not None), callback)

    def stream(self, text: str) -> Iterator[str]:
        """The pieces of the answer to the user's next turn, as they come; the turn counts once all are read."""
        steps = self._turn(text, watched=True)
        return (new.texts[0] for new in steps if new.texts is not None and new.texts[0])

    def _turn(self, text: str, *, watched: bool) -> Generator[NewToken, None, Result]:
        """Checks a turn now, and answers as the steps are taken."""
        if not isinstance(text, str):
            raise ValueError(f"`text` must be what the user says, got {text!r}.")
        before = self._messages
        messages = [*before, {"role": "user", "content": text}]
        tokens, cache = self._unseen(messages)
        asked = question(
            self._model,
            tokens,
            policy=self._policy,
            tokenizer=self._tokenizer,
            sampling=self._sampling,
            cache=cache,
            **self._settings,
        )

        def steps() -> Generator[NewToken, None, Result]:
            result = yield from answering(asked, watched=watched)
            if self._messages is not before:
                raise ValueError("another turn was answered before this one was read to its end; say it again.")
            if result.finish_reasons[0] == "nonfinite":
                return result
            answer = result.tokens[0, : result.lengths[0]]
            seen = [] if cache is None else [self._tokens]
            self._tokens = np.concatenate([*seen, asked.batch.tokens[0, : asked.batch.lengths[0]], answer])
            self._messages = [*messages, {"role": "assistant", "content": result.text}]
            self._cache, self._stats = result.cache, result.stats
            return result

        return steps()

    def _unseen(self, messages: list[dict[str, str]]) -> tuple[np.ndarray, Cache | None]:
        """The tokens that the cache has not seen, and the cache; all, and None, where it cannot go on."""
        if self._cache is not None:
            *before, _, new = messages
            given = self._settings.get("stop_tokens")
            try:
                tokens = continued_ids(
                    [new],
                    self._tokenizer,
                    last_token=int(self._tokens[-1]),
                    stops=(*self._model.spec.stop_tokens, *([] if given is None else np.ravel(given).tolist())),
                    before=before,
                )
                return tokens, self._cache
            except RewritesTurnsError:
                warnings.warn(
                    "the chat template has rewritten earlier turns: reading the whole conversation anew.",
                    RereadWarning,
                    skip_file_prefixes=(PACKAGE,),
                )
        return chat_ids(messages, self._tokenizer), None

    def __repr__(self) -> str:
        turns = sum(message["role"] == "user" for message in self._messages)
        return f"Chat({turns} turns, {len(self._tokens)} tokens seen, {self._policy or 'Full()'})"
