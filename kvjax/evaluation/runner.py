"""Runs a batch of examples with every policy that has not run it yet."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from kvjax.evaluation.contenders import Contender
from kvjax.evaluation.continuing import extended, greedy_answers, last_logits, losses
from kvjax.evaluation.experiment import Experiment, Mode
from kvjax.evaluation.prompt_parts import PromptParts
from kvjax.evaluation.records import Record
from kvjax.evaluation.shared_prefill import shared_prefill
from kvjax.evaluation.text_windows import Window
from kvjax.evaluation.units import Item, Unit, Units
from kvjax.model import Model
from kvjax.policies import Full, Policy
from kvjax.prompts import Tokenizer, batch_of
from kvjax.state import Cache
from kvjax.statistics import cache_bytes
from kvjax.steps import prefill_batch


class Wanted(NamedTuple):
    """What is to be run on a unit.

    Attributes:
        contender: with which policy.
        mode: how it is asked.
    """

    contender: Contender
    mode: Mode


class Runner:
    """A model, and what it is asked.

    Args:
        model: the model.
        tokenizer: of the model.
        experiment: the settings.
        units: the examples.
        cache_dtype: of cached keys and values; the model's by default.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, experiment: Experiment, units: Units, *, cache_dtype: object = None
    ):
        self._model, self._tokenizer = model, tokenizer
        self._experiment, self._units = experiment, units
        self._cache_dtype = cache_dtype

    def modes(self, unit: Unit) -> tuple[Mode, ...]:
        """Ways to ask a unit; perplexity has no question, and so only one."""
        return ("agnostic",) if unit.items[0].example is None else self._experiment.modes

    def run(self, unit: Unit, wanted: Sequence[Wanted]) -> Iterator[list[Record]]:
        """The records of each contender and mode, as they come."""
        if unit.items[0].example is None:
            yield from self._foretell(unit, wanted)
        else:
            yield from self._ask(unit, wanted)

    def _ask(self, unit: Unit, wanted: Sequence[Wanted]) -> Iterator[list[Record]]:
        parts = [_prompt(item) for item in unit.rows]
        # What the full cache holds does not depend on when the question comes.
        full = [entry for entry in wanted if isinstance(entry.contender.make, Full)]
        aware = full[:1] + [entry for entry in wanted if entry.mode == "aware" and entry not in full]
        agnostic = [entry for entry in wanted if entry.mode == "agnostic" and entry not in full]
        length = unit.items[0].case.length
        prompts = [part.context + part.question for part in parts]
        contexts = [part.context for part in parts]
        for entry, logits, cache in self._prefilled(prompts, contexts, aware, agnostic, length):
            if entry.mode == "aware" or entry in full:
                further = [part.later for part in parts] if parts[0].later else None
            else:
                further = [part.question + part.later for part in parts]
            if further is not None:
                batch = self._units.turn(further)
                hidden, cache = extended(self._model, cache, batch)
                logits = last_logits(self._model, hidden, batch.lengths)
            stops = self._model.spec.stop_tokens
            limits = np.asarray([part.answer_tokens for part in parts])
            answers = greedy_answers(self._model, logits, cache, limits=limits, stops=stops)
            texts = [self._tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
            for copy in full if entry in full else [entry]:
                yield self._answered(unit, copy, cache, texts)

    def _foretell(self, unit: Unit, wanted: Sequence[Wanted]) -> Iterator[list[Record]]:
        windows = [_window(item) for item in unit.rows]
        contexts = [window.context for window in windows]
        batch = self._units.turn([window.continuation for window in windows])
        for entry, _, cache in self._prefilled(contexts, None, wanted, [], unit.items[0].case.length):
            hidden, after = extended(self._model, cache, batch)
            rows, length, size = hidden.shape
            logits = self._model.logits(hidden.reshape(rows * length, size)).reshape(rows, length, -1)
            # The first one was foretold by the attention of the prompt itself, alike for all policies.
            each = np.asarray(losses(logits[:, :-1], jax.numpy.asarray(batch.tokens[:, 1:])))
            means = [row[: count - 1].mean() for row, count in zip(each, batch.lengths, strict=True)]
            del after
            yield self._records(unit, entry, cache, [float(mean) for mean in means], [""] * len(unit.items))

    def _prefilled(
        self,
        prompts: list[list[int]],
        contexts: list[list[int]] | None,
        whole: Sequence[Wanted],
        first: Sequence[Wanted],
        length: int,
    ) -> Iterator[tuple[Wanted, jax.Array, Cache]]:
        """Caches of prompts, and of their contexts alone, one after another; one prefill for all that can share it."""
        policies = {entry: entry.contender.policy(self._model.spec, length) for entry in (*whole, *first)}
        mine = [[entry for entry in entries if policies[entry].sees_whole_prompt] for entries in (whole, first)]
        if any(mine):
            made = shared_prefill(
                self._model,
                prompts,
                policies=[policies[entry] for entry in mine[0]],
                max_new_tokens=self._units.room,
                prefix_lengths=None if contexts is None else [len(context) for context in contexts],
                prefix_policies=[policies[entry] for entry in mine[1]],
                cache_dtype=self._cache_dtype,
            )
            # Each is let go of once it has answered.
            for entry in mine[0]:
                yield entry, made.logits, made.caches.pop(0)
            for entry in mine[1]:
                yield entry, made.logits, made.prefix_caches.pop(0)
        for entries, rows in ((whole, prompts), (first, contexts)):
            for entry in entries:
                if not policies[entry].sees_whole_prompt:
                    assert rows is not None
                    logits, cache = self._prefill(rows, policies[entry])
                    yield entry, logits, cache

    def _prefill(self, rows: list[list[int]], policy: Policy) -> tuple[jax.Array, Cache]:
        batch = batch_of([np.asarray(row, np.int32) for row in rows])
        logits, cache, _ = prefill_batch(
            self._model, batch, policy=policy, room=self._units.room, cache_dtype=self._cache_dtype
        )
        return logits, cache

    def _answered(self, unit: Unit, entry: Wanted, cache: Cache, texts: list[str]) -> list[Record]:
        tasks = self._experiment.named_tasks
        scores = []
        for item, text in zip(unit.items, texts, strict=False):
            task = tasks[item.case.task]
            assert task is not None
            scores.append(task.score(text, _expected(item)))
        return self._records(unit, entry, cache, scores, texts)

    def _records(self, unit: Unit, entry: Wanted, cache: Cache, scores: list[float], texts: list[str]) -> list[Record]:
        held = np.mean([np.asarray(state.lengths).mean(-1) for state in cache.layers], axis=0)
        seen, size = np.asarray(cache.next_position), cache_bytes(cache) // unit.size
        return [
            Record(
                policy=entry.contender.name,
                budget=entry.contender.budget,
                mode=entry.mode,
                **item.case._asdict(),
                score=scores[row],
                answer=texts[row],
                expected=_expected(item),
                prompt_tokens=int(seen[row]),
                kept_tokens=float(held[row]),
                cache_bytes=size,
            )
            for row, item in enumerate(unit.items)
        ]


def _prompt(item: Item) -> PromptParts:
    assert isinstance(item.parts, PromptParts)
    return item.parts


def _window(item: Item) -> Window:
    assert isinstance(item.parts, Window)
    return item.parts


def _expected(item: Item) -> tuple[str, ...]:
    return () if item.example is None else item.example.turns[-1].answers
