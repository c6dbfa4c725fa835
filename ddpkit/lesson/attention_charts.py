"""Charts of notebook 09: what attention takes by the length of the sequence, in bytes and in time."""

from collections.abc import Mapping

from .charts import HEIGHT, LEFT, MARKERS, _axes, _head, _seconds
from .figures import FAINT, NORMAL, RANK_COLOURS, WIDEST, Canvas, Picture, size

Curves = Mapping[str, Mapping[int, float]]  # {name: {length: what it takes}}


def bytes_by_length(peaks: Curves, title: str = "Most bytes alive at once") -> Picture:
    """Both axes logarithmic: what grows with the length rises by one, what grows with its square by two.

    peaks: the same on every machine, so that the picture's words hold them. Notebook 09.
    """
    canvas, axes = _by_length(peaks, title)
    axes.yaxis.set_major_formatter(lambda y, _: size(y))
    axes.set_ylabel("bytes", fontsize=NORMAL)
    said = [
        f"{name}: {', '.join(f'{n:,} tokens {size(b)}' for n, b in curve.items())}" for name, curve in peaks.items()
    ]
    return canvas.picture("\n".join([f"{title}.", *said]))


def time_by_length(seconds: Curves, ceiling: Mapping[int, float], title: str) -> Picture:
    """Both axes logarithmic. ceiling: {length: what the matrix products alone would take}, a dashed line.

    seconds: measured, so that the picture's words hold none of them. Notebook 09.
    """
    canvas, axes = _by_length(seconds, title, ceiling=ceiling)
    axes.yaxis.set_major_formatter(lambda y, _: _seconds(y))
    axes.set_ylabel("time", fontsize=NORMAL)
    lengths = ", ".join(f"{n:,}" for n in ceiling)
    return canvas.picture(
        f"{title}: {'; '.join(seconds)}. By tokens: {lengths}. Dashed: the matrix products alone, at full speed."
    )


def _by_length(curves: Curves, title: str, ceiling: Mapping[int, float] | None = None):
    """The canvas and the axes with the curves on them."""
    from matplotlib.lines import Line2D

    looks = list(zip(curves, RANK_COLOURS, MARKERS, strict=False))
    legend = [Line2D([], [], color=ink, lw=3, marker=marker, ms=11, label=name) for name, ink, marker in looks]
    dashes = {"color": "black", "lw": 2.5, "ls": (0, (3, 2))}
    legend += [Line2D([], [], label="matrix products alone", **dashes)] * bool(ceiling)
    canvas = Canvas(WIDEST, HEIGHT)
    axes = _axes(canvas, _head(canvas, title, legend), left=LEFT)
    for name, ink, marker in looks:
        axes.plot(list(curves[name]), list(curves[name].values()), color=ink, lw=3, marker=marker, ms=11)
    if ceiling:
        axes.plot(list(ceiling), list(ceiling.values()), **dashes)
    lengths = sorted({length for curve in curves.values() for length in curve})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length of the sequence (tokens)", fontsize=NORMAL)
    axes.grid(color=FAINT, lw=0.6)
    return canvas, axes
