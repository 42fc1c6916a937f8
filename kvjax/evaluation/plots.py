"""Plots of a run: where needles are found, and all others."""

import pathlib
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.evaluation.contenders import Contender
from kvjax.evaluation.experiment import Mode
from kvjax.evaluation.score_plots import figure_of, memory_against_score, score_against_budget
from kvjax.evaluation.summary import Summary
from kvjax.evaluation.table import HEADINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_plots(summary: Summary, folder: str | pathlib.Path, *, model_name: str) -> list[pathlib.Path]:
    """Writes all plots of a run that its tasks allow; returns their files.

    Args:
        summary: what was measured.
        folder: where they go.
        model_name: for the titles.
    """
    made: dict[str, Figure] = {}
    asked = [name for name, task in summary.experiment.named_tasks.items() if task is not None]
    for mode in summary.experiment.modes if asked else ():
        for task, settings in summary.experiment.named_tasks.items():
            if settings is not None and settings.has_depth:
                made[f"heatmap_{task}_{mode}"] = heatmap(summary, task=task, mode=mode, model_name=model_name)
    if asked:
        made["score_against_budget"] = score_against_budget(summary, model_name=model_name)
        made["memory_against_score"] = memory_against_score(summary, model_name=model_name)
    files = []
    for name, figure in made.items():
        files.append(pathlib.Path(folder) / f"{name}.png")
        figure.savefig(files[-1])
    return files


def heatmap(summary: Summary, *, task: str, mode: Mode, model_name: str) -> "Figure":
    """Draws the scores of a task by depth and length, a panel for each policy and budget.

    Args:
        summary: what was measured.
        task: one that has a depth.
        mode: how it was asked.
        model_name: for the title.

    Raises:
        ImportError: matplotlib is not installed.
    """
    experiment = summary.experiment
    places, rows, columns = _places(experiment.contenders)
    # A cell is wide enough for its length under it and its score in it.
    width, height = max(0.6 * len(experiment.lengths), 1.5) + 0.6, 0.34 * len(experiment.depths) + 0.7
    figure = figure_of(figsize=(max(width * columns + 1.2, 7.0), height * rows + 1.0))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.ravel():
        axes.set_axis_off()
    image: Any = None
    for contender, (row, column) in places.items():
        axes = grid[row][column]
        axes.set_axis_on()
        scores = _grid(summary, contender, task=task, mode=mode)
        image = axes.imshow(scores, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for (y, x), score in np.ndenumerate(scores):
            if np.isfinite(score):
                colour = "black" if score > 0.6 else "white"
                axes.text(x, y, f"{score:.2g}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_title(textwrap.fill(contender.label, 20), fontsize=9)
        axes.set_xticks(range(len(experiment.lengths)), [f"{length:,}" for length in experiment.lengths], fontsize=8)
        axes.set_yticks(range(len(experiment.depths)), [f"{depth:.0%}" for depth in experiment.depths], fontsize=8)
    figure.supxlabel("tokens of the prompt", fontsize=10)
    figure.supylabel("depth of what is asked for", fontsize=10)
    figure.suptitle(f"{task}, {HEADINGS[mode]}: {model_name}", fontsize=12)
    figure.colorbar(image, ax=grid, label="score", pad=0.01, fraction=0.03)
    return figure


def _places(contenders: Sequence[Contender]) -> tuple[dict[Contender, tuple[int, int]], int, int]:
    """A row and a column for each panel: a column a policy, a row a budget; and the numbers of both."""
    names = list(dict.fromkeys(contender.name for contender in contenders))
    budgets = list(dict.fromkeys(contender.budget for contender in contenders if contender.budget is not None))
    rows = {None: 0} | {budget: row for row, budget in enumerate(budgets)}
    places = {contender: (rows[contender.budget], names.index(contender.name)) for contender in contenders}
    return places, max(len(budgets), 1), len(names)


def check_installed() -> None:
    """Raises an ImportError that says what to install, unless matplotlib is there."""
    figure_of(figsize=(1, 1))


def _grid(summary: Summary, contender: Contender, *, task: str, mode: Mode) -> np.ndarray:
    """[depths, lengths], NaN where nothing was measured."""
    experiment = summary.experiment
    scores = np.full((len(experiment.depths), len(experiment.lengths)), np.nan)
    for y, depth in enumerate(experiment.depths):
        for x, length in enumerate(experiment.lengths):
            estimate = summary.score(contender, mode=mode, task=task, length=length, depth=depth)
            if estimate is not None:
                scores[y, x] = estimate.mean
    return scores
