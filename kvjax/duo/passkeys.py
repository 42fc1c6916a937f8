"""Prompts that only heads which retrieve can answer: several passkeys in a long plain text, asked for at its end."""

import functools
import hashlib
import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from kvjax.conversation import chat_text
from kvjax.prompts import Tokenizer

#: What has a passkey.
_OWNERS = (
    "lighthouse", "harvest", "violin", "glacier", "lantern", "orchard", "compass", "meadow", "castle", "market",
    "bridge", "garden", "island", "museum", "station", "tunnel", "windmill", "library", "harbour", "temple",
)  # fmt: skip
#: What passkeys are made of.
_WORDS = (
    "apple", "river", "stone", "cloud", "table", "horse", "paper", "music", "winter", "yellow", "doctor", "engine",
    "forest", "guitar", "hammer", "insect", "jacket", "kettle", "letter", "mirror", "needle", "orange", "pencil",
    "rabbit", "silver", "ticket", "uncle", "velvet", "window", "button", "candle", "dragon", "eagle", "feather",
    "ginger", "hollow", "iron", "jungle", "kitchen", "lemon", "marble", "number", "ocean", "planet", "queen",
    "ribbon", "shadow", "thunder", "umbrella", "village", "whistle", "anchor", "basket", "copper", "desert", "elbow",
    "flame", "grape", "honey", "ivory", "jewel", "knight", "ladder", "monkey", "north", "olive", "pepper", "quiet",
    "rocket", "saddle", "tiger", "under", "valley", "wagon", "zebra", "bottle", "carpet", "donkey", "early", "finger",
)  # fmt: skip
#: Each passkey has an owner of its own.
MOST_PASSKEYS = len(_OWNERS)
_INTRODUCTION = "Several passkeys are hidden in the following text. Remember them.\n\n"
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


class Example(NamedTuple):
    """A prompt with its answer.

    Attributes:
        tokens: [T], the text with its passkeys, the question, and the answer.
        labels: [T], True where the token that follows is one of a passkey in the answer.
    """

    tokens: Int[np.ndarray, "T"]
    labels: Bool[np.ndarray, "T"]


class PasskeyPrompts:
    """Makes prompts of exactly the length that is asked for.

    The long text is tokenised once. Passkeys lie at random depths, between sentences; half of them are random words,
    and half are random digits, which most tokenizers split one by one. The question names their owners in another
    order than the text, and the answer gives all of them. Departs from the paper, whose passkeys are words only.

    Args:
        tokenizer: of the model; its chat template is used if it has one.
        haystack: plain text; Python's own documentation by default.
        passkeys: how many a prompt has.
        size: words of a passkey of words, digits of one of digits.

    Raises:
        ValueError: more passkeys than owners, or a haystack without text.
    """

    def __init__(self, tokenizer: Tokenizer, *, haystack: str | None = None, passkeys: int = 5, size: int = 6):
        if not 1 <= passkeys <= MOST_PASSKEYS:
            raise ValueError(f"`passkeys` must be from 1 to {MOST_PASSKEYS}, got {passkeys}.")
        if size < 1:
            raise ValueError(f"`passkey_size` must be at least 1, got {size}.")
        sentences = _sentences(_documentation() if haystack is None else haystack)
        if not sentences:
            raise ValueError("`haystack` must be a text of words, got none.")
        self._tokenizer = tokenizer
        self._passkeys, self._size = passkeys, size
        self._sentences = [self._encoded(f" {sentence}") for sentence in sentences]
        self._head, self._tail = self._around()

    @property
    def digest(self) -> str:
        """Tells prompts of one text and tokenizer from those of another; Python's documentation has versions too."""
        pieces = repr((self._head, self._tail, self._sentences))
        return hashlib.sha256(pieces.encode()).hexdigest()[:16]

    def example(self, length: int, rng: np.random.Generator) -> Example:
        """A prompt of `length` tokens.

        Raises:
            ValueError: passkeys, question and answer do not fit into `length`.
        """
        owners = [str(owner) for owner in rng.choice(_OWNERS, self._passkeys, replace=False)]
        keys = [self._passkey(rng) for _ in owners]
        facts = [[*self._fact(owner), *key, *self._end] for owner, key in zip(owners, keys, strict=True)]
        order = rng.permutation(len(owners))
        question = self._encoded(_question([owners[index] for index in order]))
        answer, labels = [], []
        for index in order:
            before = self._fact(owners[index]) if answer else self._encoded(_fact(owners[index]).lstrip())
            labels += [False] * (len(before) - 1) + [True] * len(keys[index]) + [False] * (1 + len(self._end))
            answer += [*before, *keys[index], *self._end]
        fixed = len(self._head) + sum(map(len, facts)) + len(question) + len(self._tail) + len(answer)
        if length <= fixed:
            raise ValueError(
                f"`min_length` must leave room for {self._passkeys} passkeys, the question and the answer, which take "
                f"{fixed} tokens; got {length}."
            )
        text = self._haystack(length - fixed, facts, rng)
        prompt = [*self._head, *text, *question, *self._tail]
        return Example(np.asarray(prompt + answer, np.int32), np.asarray([False] * len(prompt) + labels))

    def _haystack(self, room: int, facts: list[list[int]], rng: np.random.Generator) -> list[int]:
        """So many tokens of running text from a random place, with the facts between its sentences."""
        start, sentences = int(rng.integers(len(self._sentences))), []
        while room > 0:
            sentence = self._sentences[(start + len(sentences)) % len(self._sentences)][:room]
            sentences.append(sentence)
            room -= len(sentence)
        places = np.sort(rng.integers(len(sentences) + 1, size=len(facts)))
        for place, fact in reversed(list(zip(places, facts, strict=True))):
            sentences.insert(int(place), fact)
        return [token for sentence in sentences for token in sentence]

    def _passkey(self, rng: np.random.Generator) -> list[int]:
        if rng.random() < 0.5:
            return self._encoded(" " + "".join(str(digit) for digit in rng.integers(10, size=self._size)))
        return self._encoded("".join(f" {word}" for word in rng.choice(_WORDS, self._size)))

    def _fact(self, owner: str) -> list[int]:
        return self._encoded(_fact(owner))

    @functools.cached_property
    def _end(self) -> list[int]:
        return self._encoded(".")

    def _around(self) -> tuple[list[int], list[int]]:
        """What stands before the text, and between the question and the answer."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            return self._tokenizer.encode(_INTRODUCTION), self._encoded("\n\n")
        chat = chat_text([{"role": "user", "content": f"{_INTRODUCTION}{_MARK}"}], self._tokenizer)
        head, mark, tail = chat.partition(_MARK)
        assert mark, "the chat template must give the message back"
        return self._encoded(head), self._encoded(tail)

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _fact(owner: str) -> str:
    return f" The passkey of the {owner} is:"


def _question(owners: list[str]) -> str:
    named = [f"the {owner}" for owner in owners]
    if len(named) == 1:
        return f"\n\nWhat is the passkey of {named[0]}?"
    return f"\n\nWhat are the passkeys of {', '.join(named[:-1])} and {named[-1]}?"


def _sentences(text: str) -> list[str]:
    """Sentences, their line breaks and indents turned into spaces."""
    return [sentence for sentence in re.split(r"(?<=[.!?:]) ", " ".join(text.split())) if sentence]


def _documentation() -> str:
    """The topics that Python's `help` shows: half a million characters of English in every installation."""
    from pydoc_data import topics

    return " ".join(topics.topics.values())
