"""A needle in a haystack: one sentence with a number, somewhere in a long plain text that a seed makes."""

from typing import NamedTuple

import numpy as np

from kvjax.prompts import Tokenizer

_WHO = (
    "The gardener",
    "My neighbour",
    "A tall visitor",
    "The postman",
    "Our teacher",
    "The baker's son",
    "An old friend",
    "The librarian",
)
_DID = (
    "walked along the river",
    "painted the kitchen door",
    "bought a basket of pears",
    "watched the trains go by",
    "mended a wooden chair",
    "looked for the grey cat",
    "read the morning paper",
    "swept the yard",
)
_WHEN = (
    "before breakfast",
    "on a quiet Sunday",
    "while it was raining",
    "after the market had closed",
    "in the last light of the day",
    "as the bells were ringing",
    "long before anyone else was up",
    "when the fog had lifted",
)
_KEYS = ("lighthouse", "harvest", "violin", "glacier", "lantern", "orchard", "compass", "meadow")


class Needle(NamedTuple):
    """A haystack with its needle.

    Attributes:
        context: the haystack, the needle in it.
        question: what to ask about it.
        answer: the number that a right answer contains.
    """

    context: str
    question: str
    answer: str

    @property
    def prompt(self) -> str:
        """Context and question in one text."""
        return f"{self.context}\n\n{self.question}"


def needle(tokenizer: Tokenizer, *, tokens: int, depth: float = 0.5, seed: int = 0) -> Needle:
    """A text of about `tokens` tokens with one magic number in it.

    Args:
        tokenizer: counts the tokens.
        tokens: of the whole prompt, question included; a chat template adds its own.
        depth: where the needle lies: 0 at the start, 1 at the end.
        seed: of text, key and number.

    Raises:
        ValueError: too few tokens for needle and question, or a depth outside [0, 1].
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"`depth` must be from 0 to 1, got {depth}.")
    rng = np.random.default_rng(seed)
    key, number = str(rng.choice(_KEYS)), str(rng.integers(10_000, 100_000))
    fact = f"One of the special magic numbers for {key} is: {number}."
    question = (
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )
    room = tokens - len(tokenizer.encode(f"\n\n{fact} {question}", add_special_tokens=False))
    if room < 0:
        raise ValueError(f"`tokens` must leave room for needle and question, {tokens - room}; got {tokens}.")
    sentences, used = [], 0
    while True:
        sentence = plain_sentence(rng)
        size = len(tokenizer.encode(f" {sentence}", add_special_tokens=False))
        if used + size > room:
            break
        sentences.append(sentence)
        used += size
    sentences.insert(round(depth * len(sentences)), fact)
    return Needle(" ".join(sentences), question, number)


def plain_sentence(rng: np.random.Generator) -> str:
    """A sentence of plain English that nobody wrote."""
    who, did, when = (str(rng.choice(words)) for words in (_WHO, _DID, _WHEN))
    return f"{who} {did} {when}."
