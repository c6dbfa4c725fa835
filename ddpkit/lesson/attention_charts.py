"""Charts of notebook 09: what attention takes by the length of the sequence, in bytes and time."""

from collections.abc import Mapping

from ..tools.units import size
from . import page
from .page import Picture, chart, legend

Curves = Mapping[str, Mapping[int, float]]  # {name: {length: what it takes}}


def bytes_by_length(peaks: Curves, title: str = "Most bytes alive at once") -> Picture:
    """Both axes logarithmic: what grows with the length rises by one, with its square by two.

    peaks: the same on every machine, so that the picture's words hold them. Notebook 09.
    """
    figure = _by_length(peaks, title, "B")
    said = [f"{title}."]
    for name, curve in peaks.items():
        parts = [f"{length:,} tokens {size(nbytes)}" for length, nbytes in curve.items()]
        said.append(f"{name}: {', '.join(parts)}")
    return Picture(figure, "\n".join(said))


def time_by_length(seconds: Curves, ceiling: Mapping[int, float], title: str) -> Picture:
    """Both axes logarithmic. ceiling: {length: time of the matrix products alone}, a dashed line.

    seconds: measured, so that the picture's words hold none of them. Notebook 09.
    """
    figure = _by_length(seconds, title, "s", ceiling)
    lengths = ", ".join(f"{length:,}" for length in ceiling)
    said = f"{title}: {'; '.join(seconds)}. By tokens: {lengths}."
    return Picture(figure, f"{said} Dashed: the matrix products alone, at full speed.")


def _by_length(curves: Curves, title: str, unit: str, ceiling: Mapping[int, float] | None = None):
    """The figure with the curves on it."""
    figure, (axes,) = chart(title)
    looks = zip(page.RANK_COLOURS, page.MARKERS, strict=False)
    for (name, curve), (fill, marker) in zip(curves.items(), looks, strict=False):
        style = {"color": fill, "lw": 3, "marker": marker, "ms": 11}
        axes.plot(list(curve), list(curve.values()), label=name, **style)
    if ceiling:
        style = {"color": "black", "lw": 2.5, "ls": page.DASHES}
        axes.plot(list(ceiling), list(ceiling.values()), label="matrix products alone", **style)
    page.by_tokens(axes, sorted(set().union(*curves.values())))
    page.log_y(axes, "bytes" if unit == "B" else "time", unit)
    legend(figure, axes.lines)
    return figure
