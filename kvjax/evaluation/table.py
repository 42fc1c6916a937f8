"""A run as Markdown."""

import itertools
from collections.abc import Iterator, Sequence

from kvjax.evaluation.experiment import PERPLEXITY, Mode
from kvjax.evaluation.summary import Estimate, Summary

#: What the ways to ask are called.
HEADINGS: dict[Mode, str] = {"aware": "question first", "agnostic": "question later"}


def markdown(summary: Summary, *, model_name: str) -> str:
    """The tables: all tasks together for each length, then each task.

    Args:
        summary: what was measured.
        model_name: for the title.
    """
    experiment = summary.experiment
    lines = [f"# {model_name}: what compressed caches still know", ""]
    lines += [
        "Scores are the share of what is asked for that the answer has, with Wilson's 95 % interval, which for scores "
        'between 0 and 1 is wider than need be. "Question first": the question was in the prompt that was compressed. '
        '"Question later": the text was compressed alone, then the question came. "Kept": tokens that a KV head held '
        "when it answered, and the bytes of a row's cache, room for answers included.",
        "",
    ]
    for length in experiment.lengths:
        lines += [f"## {length:,} tokens, all tasks", "", *_overview(summary, length), ""]
    for task, made in experiment.named_tasks.items():
        if made is not None:
            lines += [f"## {task}", "", f"`{made!r}`", "", *_task(summary, task), ""]
    return "\n".join(lines)


def _overview(summary: Summary, length: int) -> Iterator[str]:
    experiment = summary.experiment
    asked = [task for task, made in experiment.named_tasks.items() if made is not None]
    modes: tuple[Mode, ...] = experiment.modes if asked else ()
    foretold = PERPLEXITY in experiment.named_tasks
    headings = ["policy", "budget", "kept", "MB a row", *(HEADINGS[mode] for mode in modes)]
    yield from _head([*headings, *(["perplexity"] if foretold else [])])
    for contender in experiment.contenders:
        cells = [
            *(contender.name, contender.budget_text),
            f"{summary.kept_tokens(contender, length=length):,.0f}",
            f"{summary.cache_bytes(contender, length=length) / 1e6:.3g}",
        ]
        cells += [_share(summary.score(contender, mode=mode, length=length)) for mode in modes]
        if foretold:
            estimate = summary.perplexity(contender, length=length)
            cells.append("" if estimate is None else f"{estimate.mean:.2f} ({estimate.low:.2f} to {estimate.high:.2f})")
        yield _row(cells)


def _task(summary: Summary, task: str) -> Iterator[str]:
    experiment = summary.experiment
    columns = list(itertools.product(experiment.lengths, experiment.modes))
    yield from _head(["policy", "budget", *(f"{length:,}, {HEADINGS[mode]}" for length, mode in columns)])
    for contender in experiment.contenders:
        scores = [summary.score(contender, mode=mode, length=length, task=task) for length, mode in columns]
        yield _row([*(contender.name, contender.budget_text), *map(_share, scores)])


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f"{estimate.mean:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def _head(cells: Sequence[str]) -> tuple[str, str]:
    return _row(cells), f"|{'---|' * len(cells)}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
