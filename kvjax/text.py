"""Text as it comes: token ids become pieces of text, and stop strings end them."""

from collections.abc import Sequence

from kvjax.tokenizing import Tokenizer

# What a tokenizer gives for the bytes of a character that is not complete yet.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one row, token by token.

    Some characters take several tokens, and some tokenizers write a token's space only when another stands before
    it: so a piece is the difference of two texts that both begin a few tokens earlier.

    Args:
        tokenizer: gives the text of ids.
        stop_strings: the text ends before the first of them.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        # A stop string may begin in text that has not been given out: as much is held back.
        self._held_back = max((len(s) - 1 for s in self._stop_strings), default=0)
        self._ids: list[int] = []
        self._context, self._decoded = 0, 0
        self._given = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Takes a token and returns the text that can be shown because of it."""
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._decoded])
        after = self._decode(self._ids[self._context :])
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        self._context, self._decoded = self._decoded, len(self._ids)
        self._append(after[len(before) :])
        return self._give(self._held_back)

    def finish(self) -> str:
        """The rest of the text, once no token will come."""
        if not self.stopped:
            before = self._decode(self._ids[self._context : self._decoded])
            after = self._decode(self._ids[self._context :])
            self._decoded = len(self._ids)
            self._append(after[len(before) :])
        return self._give(0)

    def _append(self, piece: str) -> None:
        start = max(len(self.text) - self._held_back, 0)
        self.text += piece
        found = [at for at in (self.text.find(s, start) for s in self._stop_strings) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _give(self, held_back: int) -> str:
        end = len(self.text) if self.stopped else max(len(self.text) - held_back, self._given)
        piece, self._given = self.text[self._given : end], max(end, self._given)
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
