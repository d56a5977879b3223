"""The picture of a training run."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from examples.rnn_ps.roles import Epoch


def draw_curve(epochs: Sequence[Epoch], bigram: float, out: Path) -> Path:
    """Draws the perplexities over the epochs beside that of a bigram model, and returns the path of the picture."""
    path = out / "perplexity.png"
    numbers = [epoch.number for epoch in epochs]
    figure = Figure(figsize=(8, 4.5), layout="constrained")  # no pyplot, so no display is looked for
    axes = figure.subplots()
    axes.plot(numbers, [epoch.train for epoch in epochs], color="0.6", marker=".", label="training")
    axes.plot(numbers, [epoch.valid for epoch in epochs], color="C0", marker=".", label="validation")
    axes.axhline(bigram, color="C2", linestyle="--", linewidth=1, label=f"bigram model: {bigram:.1f}")
    axes.set(xlabel="epoch", ylabel="perplexity", title="Language model of Python's reference", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(loc="best")
    figure.savefig(path, dpi=120)
    return path
