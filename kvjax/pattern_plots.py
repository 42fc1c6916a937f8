"""Plots of head patterns."""

from typing import TYPE_CHECKING

import numpy as np

from kvjax.extras import extra
from kvjax.head_pattern import HeadPattern

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def head_pattern_map(pattern: HeadPattern, *, title: str = "Which heads retrieve") -> "Figure":
    """Draws a pattern: layers to the right, KV heads downwards, alpha as colour; below it, how many heads have which.

    The histogram also shows, for every sparsity, the score up to which heads would stream. Save it with
    `figure.savefig("pattern.png")`.

    Args:
        pattern: the scores of every layer and KV head.
        title: above the map.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with extra("plot", purpose="a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    scores = np.asarray(pattern.scores)
    layers, heads = scores.shape
    figure = Figure(figsize=(10, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=(min(max(heads / 4, 0.8), 2.0), 1.2))
    image = top.imshow(scores.T, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    top.set_title(title)
    top.set_xlabel("layer")
    top.set_ylabel("KV head")
    for axis in (top.xaxis, top.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=top, label="alpha: 1 retrieves, 0 streams", pad=0.01)

    bottom.hist(scores.ravel(), bins=np.linspace(0, 1, 21).tolist(), color="#9db8e0", edgecolor="white")
    bottom.set_xlabel("alpha")
    bottom.set_ylabel(f"heads of {layers * heads}")
    bottom.set_xlim(0, 1)
    bottom.yaxis.set_major_locator(MaxNLocator(integer=True))
    share = bottom.twinx()
    share.plot(np.sort(scores.ravel()), np.arange(1, scores.size + 1) / scores.size, color="#1f4e9c")
    share.set_ylim(0, 1.02)
    share.yaxis.set_major_formatter(PercentFormatter(1.0))
    share.set_ylabel("heads up to this alpha\n(the sparsity that it cuts at)")
    return figure
