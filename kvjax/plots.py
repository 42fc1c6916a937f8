"""Plots of what a cache holds."""

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.extras import extra
from kvjax.inspection import kept_mask
from kvjax.state import Cache
from kvjax.statistics import cache_bytes, full_cache_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The most columns of the map, about one for each pixel; longer rows are binned.
_COLUMNS = 900
_KEPT, _LIGHT, _MARK = "#1f4e9c", "#9db8e0", "#c2410c"


def retention_map(cache: Cache, *, row: int = 0, marks: Mapping[str, tuple[int, int]] | None = None) -> "Figure":
    """Draws which tokens of a row each head holds: heads downwards, layer by layer, positions to the right.

    Above the map: the share of all heads that hold each position. Right of it: the share of the row that each head
    holds. A row longer than the map's pixels is binned, and colour is then the share of the bin that is held. Save
    it with `figure.savefig("retention.png")`.

    Args:
        cache: what is kept.
        row: of the cache.
        marks: spans of positions to point out, first and last one, by their label.

    Raises:
        ValueError: the cache has no such row.
        ImportError: matplotlib is not installed.
    """
    figure_class, percent, integers, colors = _matplotlib()
    mask = kept_mask(cache, row=row)
    layers, heads, seen = mask.shape
    figure = figure_class(figsize=(12, 7.5), dpi=120, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(12, 1.3), height_ratios=(1, 5))
    middle = figure.add_subplot(grid[1, 0])
    top = figure.add_subplot(grid[0, 0], sharex=middle)
    right = figure.add_subplot(grid[1, 1], sharey=middle)
    figure.suptitle(_title(cache, mask), fontsize=12)

    binned = _binned(mask.reshape(layers * heads, seen))
    extent = (-0.5, seen - 0.5, layers * heads, 0)
    palette = colors.from_list("kept", ["white", _LIGHT, _KEPT])
    image = middle.imshow(binned, cmap=palette, vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent)
    for layer in range(1, layers):
        middle.axhline(layer * heads, color="0.75", linewidth=0.4)
    middle.xaxis.set_major_locator(integers(integer=True))
    middle.set_xlabel("position in the row (token)")
    middle.set_ylabel(f"layer ({heads} KV head{'s' if heads > 1 else ''} each)")
    shown = np.arange(0, layers, 1 if layers <= 8 else 2 if layers <= 16 else 5)
    middle.set_yticks((shown + 0.5) * heads, [str(layer) for layer in shown])

    per_bin = binned.mean(0)
    edges = np.linspace(-0.5, seen - 0.5, len(per_bin) + 1)
    top.stairs(per_bin, edges, fill=True, color=_KEPT)
    top.set_ylim(0, 1.02)
    top.yaxis.set_major_formatter(percent(1.0))
    top.set_ylabel("heads that\nhold it")
    top.tick_params(labelbottom=False)
    _mark(top, middle, marks or {})

    per_head = mask.mean(2).reshape(-1)
    right.stairs(per_head, np.arange(len(per_head) + 1), orientation="horizontal", fill=True, color=_KEPT)
    right.set_xlim(0, min(per_head.max() * 1.15 + 0.01, 1.0))
    right.xaxis.set_major_formatter(percent(1.0, decimals=0))
    right.set_xlabel("of the row\nin each head")
    right.tick_params(labelleft=False)

    if binned.shape[1] < seen:
        label = f"share held of each bin of {seen / binned.shape[1]:.1f} tokens"
        figure.colorbar(image, ax=[middle, right], label=label, format=percent(1.0), pad=0.01, fraction=0.03)
    return figure


def check_installed() -> None:
    """Raises an ImportError that says what to install, unless matplotlib is there."""
    _matplotlib()


def _matplotlib() -> tuple[Any, Any, Any, Any]:
    """What is used of it, without the global state of pyplot."""
    with extra("plot", purpose="a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter

    def figure(**settings: Any) -> "Figure":
        made = Figure(**settings)
        FigureCanvasAgg(made)
        return made

    return figure, PercentFormatter, MaxNLocator, LinearSegmentedColormap


def _binned(mask: np.ndarray) -> np.ndarray:
    """Rows [R, n] of at most `_COLUMNS` columns, the mean of each bin."""
    seen = mask.shape[1]
    columns = min(seen, _COLUMNS)
    starts = np.arange(columns) * seen // columns
    sizes = np.diff(np.append(starts, seen))
    return np.add.reduceat(mask.astype(np.float32), starts, axis=1) / sizes[None]


def _mark(top: "Axes", middle: "Axes", marks: Mapping[str, tuple[int, int]]) -> None:
    """Points out spans by a band through both axes, and their label above them."""
    for label, (first, last) in marks.items():
        for axes in (top, middle):
            axes.axvspan(first - 0.5, last + 0.5, facecolor="none", edgecolor=_MARK, linewidth=1)
        place = (first + last) / 2
        top.annotate(
            label,
            (place, 1.0),
            xycoords=top.get_xaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            color=_MARK,
            ha="center",
            va="bottom",
        )


def _title(cache: Cache, mask: np.ndarray) -> str:
    rows, seen = cache.next_position.shape[0], mask.shape[2]
    held, full = cache_bytes(cache) / rows, full_cache_bytes(cache, seen) / rows
    cost = f"{held / 1e6:.3g} MB; keys and values of all are {full / 1e6:.3g} MB"
    return f"{short_name(cache.policy)}\nholds {mask.mean():.1%} of {seen:,} tokens in {cost}"


def short_name(policy: Any) -> str:
    """A policy with its budget and the settings that are not its defaults."""
    fields = [field for field in dataclasses.fields(policy) if field.init]
    changed = [field for field in fields if getattr(policy, field.name) != field.default]
    settings = ", ".join(f"{field.name}={getattr(policy, field.name)!r}" for field in changed)
    return textwrap.shorten(f"{type(policy).__name__}({settings})", 110, placeholder=" ...)")
