"""Batches of examples that go through the model together."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.allocation import bucket
from kvjax.evaluation.experiment import PERPLEXITY, Case, Experiment
from kvjax.evaluation.prompt_parts import PromptParts, fitted
from kvjax.evaluation.task import Example
from kvjax.evaluation.text_windows import FORETOLD, TextWindows, Window
from kvjax.prompts import Batch, Tokenizer


class Item(NamedTuple):
    """A case, made.

    Attributes:
        case: which.
        example: what is asked and answered; None for perplexity.
        parts: its tokens; a window of a text for perplexity.
    """

    case: Case
    example: Example | None
    parts: PromptParts | Window


class Unit(NamedTuple):
    """Items that go in together, of one length and one kind.

    Attributes:
        items: at most `size` of them.
        size: rows of the batch; the last item is repeated where there are fewer, so that all batches have one shape.
    """

    items: tuple[Item, ...]
    size: int

    @property
    def rows(self) -> list[Item]:
        """An item for each row."""
        return [*self.items, *[self.items[-1]] * (self.size - len(self.items))]


class Units(NamedTuple):
    """All that is to be run.

    Attributes:
        units: the batches, in order.
        room: tokens of the longest answer: all caches have room for it, so that they have one shape.
        turn_tokens: padded length of one turn's tokens.
    """

    units: tuple[Unit, ...]
    room: int
    turn_tokens: int

    def turn(self, rows: Sequence[Sequence[int]]) -> Batch:
        """Further tokens, padded to a length that few batches do not share."""
        lengths = np.asarray([len(row) for row in rows], np.int32)
        tokens = np.zeros((len(rows), max(self.turn_tokens, bucket(int(lengths.max())))), np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        return Batch(tokens, lengths)


def make_units(experiment: Experiment, tokenizer: Tokenizer) -> Units:
    """All examples of an experiment, in batches of one length and kind; those with long answers last.

    Raises:
        ValueError: a length is too short for a task, or the text for a length.
    """
    units: list[Unit] = []
    items = list(_items(experiment, tokenizer))
    for length in experiment.lengths:
        for turns in (1, 2, 0):
            mine = [item for item in items if item.case.length == length and _turns(item) == turns]
            mine.sort(key=_answer_tokens)
            size = experiment.batch_size
            units += [Unit(tuple(mine[first : first + size]), size) for first in range(0, len(mine), size)]
    parts = [item.parts for item in items if isinstance(item.parts, PromptParts)]
    turns_of = [max(len(part.later), len(part.question) if not part.later else 0) for part in parts]
    return Units(
        units=tuple(units),
        room=max((_answer_tokens(item) for item in items), default=1),
        turn_tokens=bucket(max([FORETOLD, *turns_of])),
    )


def _items(experiment: Experiment, tokenizer: Tokenizer) -> Iterator[Item]:
    tasks = experiment.named_tasks
    windows = None
    if PERPLEXITY in tasks:
        windows = TextWindows(experiment.text, tokenizer, longest=max(experiment.lengths))
    for length in experiment.lengths:
        for case in experiment.cases(length):
            task = tasks[case.task]
            if task is None:
                assert windows is not None
                yield Item(case, None, windows.window(experiment, case))
            else:
                depth, seed = case.depth or 0.0, experiment.seed_of(case)
                yield Item(case, *fitted(task, tokenizer, length=length, depth=depth, seed=seed))


def _turns(item: Item) -> int:
    return 0 if item.example is None else len(item.example.turns)


def _answer_tokens(item: Item) -> int:
    return item.parts.answer_tokens if isinstance(item.parts, PromptParts) else 1
