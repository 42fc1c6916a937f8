"""Plots of a run: what a budget and a byte buy."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.evaluation.contenders import Contender
from kvjax.evaluation.experiment import Mode
from kvjax.evaluation.summary import Summary
from kvjax.evaluation.table import HEADINGS
from kvjax.extras import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's colours, which colour-blind readers tell apart; a shape for each too.
_COLOURS = (
    "#000000",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F7F7F",
    "#8C564B",
    "#BCBD22",
)
_MARKERS = ("*", "o", "s", "^", "D", "v", "P", "X", "<", ">")

#: Where a contender stands on the horizontal axis, with prompts of a length.
_Place = Callable[[Contender, int], float]


def score_against_budget(summary: Summary, *, model_name: str) -> "Figure":
    """Draws the mean score of all tasks over the tokens that a head kept, a panel for each length and way to ask."""

    def tokens(contender: Contender, length: int) -> float:
        return summary.kept_tokens(contender, length=length)

    return _scores(summary, tokens, xlabel="tokens kept in a KV head", title=f"Score against budget: {model_name}")


def memory_against_score(summary: Summary, *, model_name: str) -> "Figure":
    """Draws the mean score of all tasks over the bytes of a row's cache, a panel for each length and way to ask."""

    def megabytes(contender: Contender, length: int) -> float:
        return summary.cache_bytes(contender, length=length) / 1e6

    title = f"Memory against score: {model_name}"
    return _scores(summary, megabytes, xlabel="MB of a row's cache", title=title)


def figure_of(**settings: Any) -> "Figure":
    """A figure, without the global state of pyplot.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with extra("plot", purpose="a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    made = Figure(dpi=120, layout="constrained", **settings)
    FigureCanvasAgg(made)
    return made


def _scores(summary: Summary, place: _Place, *, xlabel: str, title: str) -> "Figure":
    experiment = summary.experiment
    rows, columns = len(experiment.lengths), len(experiment.modes)
    figure = figure_of(figsize=(5.2 * columns + 2.0, 3.6 * rows + 0.6))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    lines: dict[str, Any] = {}
    for row, length in enumerate(experiment.lengths):
        for column, mode in enumerate(experiment.modes):
            axes = grid[row][column]
            lines = _panel(axes, summary, place, length=length, mode=mode)
            axes.set_title(f"{length:,} tokens, {HEADINGS[mode]}", fontsize=10)
            axes.set_xlabel(xlabel)
            if column == 0:
                axes.set_ylabel("mean score of all tasks")
    figure.suptitle(title, fontsize=12)
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", title="policy")
    return figure


def _panel(axes: "Axes", summary: Summary, place: _Place, *, length: int, mode: Mode) -> dict[str, Any]:
    """Draws a line a policy, and the budgets above them; returns the lines by name."""
    contenders = summary.experiment.contenders
    names = list(dict.fromkeys(contender.name for contender in contenders))
    lines: dict[str, Any] = {}
    places: dict[str, list[float]] = {}
    for index, name in enumerate(names):
        mine = sorted((c for c in contenders if c.name == name), key=lambda contender: place(contender, length))
        scores = [(c, summary.score(c, mode=mode, length=length)) for c in mine]
        points = [(place(c, length), estimate) for c, estimate in scores if estimate is not None]
        # Many stand at one budget: each is moved aside a little.
        x = np.asarray([where for where, _ in points]) * 1.015 ** (index - (len(names) - 1) / 2)
        marker = _MARKERS[index % len(_MARKERS)]
        lines[name] = axes.errorbar(
            *(x, [estimate.mean for _, estimate in points]),
            yerr=np.asarray([(e.mean - e.low, e.high - e.mean) for _, e in points]).T,
            color=_COLOURS[index % len(_COLOURS)],
            marker=marker,
            markersize=11 if marker == "*" else 6,
            linewidth=1.3,
            elinewidth=0.6,
        )
        for bars in lines[name].lines[2]:
            bars.set_alpha(0.45)
        for contender in mine:
            if contender.budget is not None:
                places.setdefault(contender.budget_text, []).append(place(contender, length))
    for budget, where in places.items():
        middle = float(np.exp(np.mean(np.log(where))))
        axes.text(middle, 1.23, f"budget\n{budget}", ha="center", va="top", fontsize=8, color="0.3")
    _logarithmic(axes)
    axes.set_ylim(-0.04, 1.25)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.grid(alpha=0.3)
    return lines


def _logarithmic(axes: "Axes") -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
