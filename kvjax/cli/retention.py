"""What a cache keeps, as text: by layer, by span and by token."""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.inspection import AttentionMass, TokenRetention

_LONGEST_SPAN, _SHOWN_SPANS, _SHOWN_CHARACTERS = 24, 8, 72


class Span(NamedTuple):
    """Tokens that belong together: about a sentence.

    Attributes:
        first: position of the first token.
        last: position of the last token.
        text: theirs.
        share: of the heads, that keep a token of it; the mean over its tokens.
    """

    first: int
    last: int
    text: str
    share: float


def spans(table: Sequence[TokenRetention], *, heads: int) -> list[Span]:
    """A row's tokens in spans, which end with a sentence or a line, or after some tokens."""
    found, current = [], []
    following = [entry.text for entry in table[1:]] + [""]
    for entry, after in zip(table, following, strict=True):
        current.append(entry)
        sentence = entry.text.endswith((".", "!", "?")) and not after[:1].strip()
        line = entry.text.endswith("\n") and not after.startswith("\n")
        if sentence and after.startswith("\n"):
            continue  # The line end belongs to the sentence.
        if sentence or line or len(current) >= _LONGEST_SPAN:
            found.append(_span(current, heads))
            current = []
    return [*found, _span(current, heads)] if current else found


def span_with(table: Sequence[TokenRetention], text: str, *, heads: int) -> Span:
    """The tokens that some text of the row lies in.

    Raises:
        ValueError: the row does not have the text.
    """
    start = "".join(entry.text for entry in table).index(text)
    ends = np.cumsum([len(entry.text) for entry in table])
    first, last = np.searchsorted(ends, [start, start + len(text) - 1], side="right").tolist()
    return _span(table[first : last + 1], heads)


def _span(entries: Sequence[TokenRetention], heads: int) -> Span:
    text = "".join(entry.text for entry in entries)
    share = float(np.mean([entry.heads for entry in entries])) / heads
    return Span(entries[0].position, entries[-1].position, text, share)


def layer_lines(counts: np.ndarray, mass: AttentionMass) -> Iterator[str]:
    """A table of layers, of the one row that `mass` has.

    Args:
        counts: [L, K], tokens that each head keeps.
        mass: of the same layers.
    """
    yield "layer  tokens a head  attention held  at best"
    for layer, heads in enumerate(counts):
        few, many = int(heads.min()), int(heads.max())
        kept = f"{few}" if few == many else f"{few}-{many}"
        held, best = mass.kept[layer, 0].mean(), mass.oracle[layer, 0].mean()
        yield f"{layer:>5}  {kept:>13}  {percent(held):>14}  {percent(best):>7}"


def span_lines(found: Sequence[Span]) -> Iterator[str]:
    """The most and the least kept spans, each kind in the order of the row; all where there are few."""
    if len(found) <= 2 * _SHOWN_SPANS:
        yield from _titled("spans", found)
        return
    ranked = sorted(found, key=lambda span: -span.share)
    yield from _titled("most kept spans", ranked[:_SHOWN_SPANS])
    yield ""
    yield from _titled("least kept spans", ranked[-_SHOWN_SPANS:])


def _titled(title: str, found: Sequence[Span]) -> Iterator[str]:
    yield f"  heads    positions  {title}"
    for span in sorted(found):
        yield f"{percent(span.share):>7}  {f'{span.first}-{span.last}':>11}  {quoted(span.text)}"


def token_lines(table: Sequence[TokenRetention], *, heads: int) -> Iterator[str]:
    """All tokens, each with how many heads keep it."""
    yield f"{f'of {heads}':>7}  {'position':>11}  token"
    for entry in table:
        yield f"{entry.heads:>7}  {entry.position:>11}  {quoted(entry.text)}"


def quoted(text: str) -> str:
    """A text on one line, in quotes, its middle left out where it is long."""
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2 - 2
        text = f"{text[:half]} ... {text[-half:]}"
    return json.dumps(text, ensure_ascii=False)


def percent(share: float) -> str:
    """A share in hundredths."""
    return f"{share:.1%}".replace("%", " %")
