"""The tables and plots of the five methods, from what has been recorded."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from five_methods_settings import FULL, LENGTHS, METHODS, PROMPT, SETTINGS, Method, Setting, contender_name, contenders
from five_methods_steps import Timed, full_of, one_of, overheads, ratio

from kvjax.evaluation import Contender, Estimate, Summary
from kvjax.evaluation.experiment import Mode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What is asked, and how: the needle columns and panels.
ASKED: tuple[tuple[str, Mode, str], ...] = (
    ("needle", "aware", "needle, question first"),
    ("needle", "agnostic", "needle, question later"),
    ("multi-turn", "aware", "second needle, first question first"),
    ("multi-turn", "agnostic", "second needle, both questions later"),
)
#: Okabe and Ito's colours, which colour-blind readers tell apart; a shape for each too.
LOOKS = {
    "StreamingLLM": ("#0072B2", "o"),
    "H2O": ("#D55E00", "s"),
    "SnapKV": ("#009E73", "^"),
    "PyramidKV": ("#CC79A7", "D"),
    "DuoAttention": ("#E69F00", "v"),
}

_BESIDE = "(methods of the equal budget are drawn side by side)"


def tables(summary: Summary, steps: Sequence[Timed]) -> str:
    """How the methods select, and what was measured beside what is claimed."""
    return "\n".join([*_selection(), "", *_measured(summary, list(steps))])


def _selection() -> Iterator[str]:
    yield from _head(["method", "selection unit", "timing", '"paper" keeps'])
    for method in METHODS:
        yield _row([method.name, method.unit, method.timing, method.share_of])


def _measured(summary: Summary, steps: list[Timed]) -> Iterator[str]:
    lengths = [f"{length:,}" for length in LENGTHS]
    yield from _head(
        [
            *("method", "as", "retention", *(heading for _, _, heading in asked(summary))),
            *(f"step over Full, equal slots, {length}" for length in lengths),
            *(f"step over Full, all slots, {length}" for length in lengths),
            "bytes over Full's",
        ]
    )
    yield _row(["Full", "", *_needle_cells(summary, FULL), *[""] * 2 * len(LENGTHS), ""])
    for method in METHODS:
        for setting in SETTINGS:
            contender = method.contender(setting, PROMPT)
            yield _row(
                [
                    *(method.name, setting),
                    *_needle_cells(summary, contender),
                    *_step_cells(steps, contender.name),
                    _share(bytes_share(summary, contender)),
                ]
            )
        yield _row([method.name, "claimed", *_claims(method, questions=len(asked(summary)))])


def _claims(method: Method, *, questions: int) -> list[str]:
    said, blanks = method.claims, [""] * (len(LENGTHS) - 1)
    found_cells = [said.found, *[""] * questions][:questions]
    return [said.retention, *found_cells, said.overhead, *blanks, said.step, *blanks, said.memory]


def _needle_cells(summary: Summary, contender: Contender) -> list[str]:
    kept = retention(summary, contender)
    return [
        "" if kept is None else f"{kept:.1%}",
        *(_found(found(summary, contender, task, mode)) for task, mode, _ in asked(summary)),
    ]


def _step_cells(steps: list[Timed], name: str) -> list[str]:
    pairs = [overheads(steps, name, length) for length in LENGTHS]
    return [*(_share(pair and pair[0]) for pair in pairs), *(_share(pair and pair[1]) for pair in pairs)]


def retention(summary: Summary, contender: Contender) -> float | None:
    """Tokens that a KV head held of those that its cache had seen, the mean of all answers."""
    records = summary.of(contender)
    return sum(r.kept_tokens / r.prompt_tokens for r in records) / len(records) if records else None


def bytes_share(summary: Summary, contender: Contender) -> float | None:
    """The cache's bytes over the full one's."""
    if not summary.of(contender) or not summary.of(FULL):
        return None
    mine, full = (summary.cache_bytes(one, length=PROMPT) for one in (contender, FULL))
    return mine / full


def found(summary: Summary, contender: Contender, task: str, mode: Mode) -> Estimate | None:
    """The share of needles found; None until all examples are there, which go from the first depth to the last."""
    experiment = summary.experiment
    estimate = summary.score(contender, mode=mode, task=task)
    whole = len(experiment.depths) * experiment.samples
    return estimate if estimate is not None and estimate.examples == whole else None


def asked(summary: Summary) -> tuple[tuple[str, Mode, str], ...]:
    """The questions that any method has answered whole."""
    everyone = contenders(PROMPT)
    return tuple(
        (task, mode, heading) for task, mode, heading in ASKED if any(found(summary, c, task, mode) for c in everyone)
    )


def _found(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f"{100 * estimate.mean:.0f} % ({100 * estimate.low:.0f} to {100 * estimate.high:.0f})"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _head(cells: Sequence[str]) -> tuple[str, str]:
    return _row(cells), f"|{'---|' * len(cells)}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def found_against_bytes(summary: Summary) -> "Figure":
    """Draws the share of needles found over the share of the full cache's bytes, a panel a question."""
    questions = asked(summary)
    rows = max((len(questions) + 1) // 2, 1)
    figure = _figure(figsize=(12.5, 3.5 * rows + 0.8))
    panels = figure.subplots(rows, 2, sharex=True, sharey=True).ravel()
    marks: dict[str, Any] = {}
    for axes, (task, mode, heading) in zip(panels, questions, strict=False):
        axes.set_title(heading, fontsize=11)
        for index, (method, setting) in enumerate(_pairs()):
            contender = method.contender(setting, PROMPT)
            share, estimate = bytes_share(summary, contender), found(summary, contender, task, mode)
            if share is not None and estimate is not None:
                mark = _mark(axes, share * _aside(index, setting), estimate, method.name, setting)
                marks[_label(summary, method, setting)] = mark
        estimate = found(summary, FULL, task, mode)
        if estimate is not None:
            marks["Full: all"] = _mark(axes, 1.0, estimate, FULL.name, "paper")
        _shares(axes, "x")
        axes.set_ylim(-0.04, 1.04)
        axes.yaxis.set_major_formatter(_percent())
    figure.supxlabel(f"bytes of the cache, of the full cache's {_BESIDE}", fontsize=10)
    for axes in panels[::2]:
        axes.set_ylabel("needles found")
    figure.suptitle(f"Needles found against memory: SmolLM2-135M-Instruct, {PROMPT:,} tokens", fontsize=13)
    figure.legend(marks.values(), marks.keys(), loc="outside right upper", title="method, setting: tokens a head")
    return figure


def step_against_retention(steps: Sequence[Timed]) -> "Figure":
    """Draws a step's time over the retention, a panel a length, with the line of full caches that hold as much."""
    steps = list(steps)
    figure = _figure(figsize=(12.5, 4.8))
    marks: dict[str, Any] = {}
    for axes, length in zip(figure.subplots(1, len(LENGTHS), sharey=True), LENGTHS, strict=True):
        axes.set_title(f"{length:,} tokens", fontsize=11)
        full: dict[float, float] = {}
        for index, (method, setting) in enumerate(_pairs()):
            name = contender_name(method.name, setting)
            timed, over = one_of(steps, name, length), ratio(steps, name, FULL.name, length)
            if timed is None or over is None:
                continue
            place = timed.kept / length * _aside(index, setting)
            mark = _mark(axes, place, Estimate(over, over, over, 1), method.name, setting)
            marks[f"{method.name}, {setting}: {_kept_shares(steps, name)}"] = mark
            same = ratio(steps, full_of(timed.slots), FULL.name, length)
            if same is not None:
                full[timed.slots / length] = same
        if full:
            (marks["Full, with as many slots"],) = axes.plot(
                *zip(*sorted(full.items()), strict=True), "--", color="0.45"
            )
        _shares(axes, "x")
        axes.axhline(1.0, color="black", linewidth=0.8)
    figure.supxlabel(f"tokens kept in a KV head, of all {_BESIDE}", fontsize=10)
    figure.axes[0].set_ylabel("a step's time, of the full cache's")
    figure.suptitle("A decoding step against retention: SmolLM2-135M-Instruct", fontsize=13)
    figure.legend(marks.values(), marks.keys(), loc="outside right upper", title="method, setting: tokens kept")
    return figure


def _pairs() -> Iterator[tuple[Method, Setting]]:
    for setting in SETTINGS:
        for method in METHODS:
            yield method, setting


def _aside(index: int, setting: Setting) -> float:
    """Moves a method of the equal budget a little, so that all stand beside each other."""
    if setting != "equal":
        return 1.0
    return 1.06 ** (index % len(METHODS) - len(METHODS) // 2)


def _label(summary: Summary, method: Method, setting: Setting) -> str:
    contender = method.contender(setting, PROMPT)
    return f"{method.name}, {setting}: {summary.kept_tokens(contender, length=PROMPT):,.0f}"


def _kept_shares(steps: list[Timed], name: str) -> str:
    """What a contestant keeps of each length, once where it is the same."""
    records = [record for length in LENGTHS if (record := one_of(steps, name, length)) is not None]
    return " / ".join(dict.fromkeys(f"{record.kept / record.length:.1%}" for record in records))


def _mark(axes: "Axes", x: float, estimate: Estimate, name: str, setting: Setting) -> Any:
    """A point with its interval: filled as the paper keeps, open at the equal budget."""
    colour, marker = LOOKS.get(name, ("black", "*"))
    return axes.errorbar(
        *([x], [estimate.mean]),
        yerr=[[estimate.mean - estimate.low], [estimate.high - estimate.mean]],
        color=colour,
        marker=marker,
        markersize=12 if marker == "*" else 8,
        markerfacecolor=colour if setting == "paper" else "white",
        markeredgewidth=1.6,
        linestyle="none",
        elinewidth=0.8,
    )


def _shares(axes: "Axes", which: str) -> None:
    """A logarithmic axis of percents."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(_percent())
    axes.grid(alpha=0.3)


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


def _figure(**settings: Any) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=120, layout="constrained", **settings)
    FigureCanvasAgg(figure)
    return figure
