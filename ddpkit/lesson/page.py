"""What every figure is drawn with: colours, sizes, a canvas in pixels, charts with axes, pictures.

A rank has one colour and one label everywhere. No text is smaller than 14 pt.
"""

import colorsys
import io
import itertools
from collections.abc import Sequence
from functools import cached_property

from ..tools.units import number

DPI = 96  # a figure's pixel is a pixel of the page: 14 pt in the figure are 14 pt on the screen
WIDEST = 1040  # pixels that a page of JupyterLab has room for
TALLEST = 700
HEIGHT = 560  # of a chart
SMALL, NORMAL, LARGE = 14, 16, 18  # points
DIGIT = 12.2  # pixels that a digit of SMALL text takes

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, BLACK = "#56B4E9", "#D55E00", "#F0E442", "#000000"
RANK_COLOURS = [BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, BLACK]
MIXED = "#DDDDDD"  # a sum, or data of several ranks
EMPTY, PALE, FAINT, GREY = "#FFFFFF", "#F4F4F4", "#AAAAAA", "#666666"
WRONG = "#C8102E"
MARKERS = "osD^v"
DASHES = (0, (3, 2))
WHITE = {"fc": "white", "ec": "none", "pad": 3}  # behind text that lies on a chart


def colour(rank: int | None) -> str:
    """The colour of `rank`; grey for None. From rank 8 on they come again: labels tell which."""
    return MIXED if rank is None else RANK_COLOURS[rank % len(RANK_COLOURS)]


def _parts(fill: str) -> list[int]:
    return [int(fill[at : at + 2], 16) for at in (1, 3, 5)]


def ink(fill: str) -> str:
    """Black or white, whichever is easier to read on `fill`."""
    red, green, blue = (part / 255 for part in _parts(fill))
    return "white" if colorsys.rgb_to_yiq(red, green, blue)[0] < 0.4 else "black"


def lighter(fill: str) -> str:
    """The same hue, most of the way to white."""
    return "#" + "".join(f"{255 - (255 - part) * 3 // 10:02X}" for part in _parts(fill))


class Picture:
    """A drawn figure. `text` says what it shows; `png` is what is stored, `svg` what is live."""

    def __init__(self, figure, text: str):
        self.figure, self.text = figure, text

    def __repr__(self):
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": self.text, "image/png": self.png}

    @cached_property
    def png(self) -> bytes:
        """The page as PNG, its colours from a palette: a quarter of the size."""
        from PIL import Image

        raw, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(raw, dpi=DPI, facecolor="white")
        image = Image.open(raw).convert("RGB").quantize(128, Image.Quantize.MEDIANCUT, dither=0)
        image.save(small, "png", optimize=True)
        return small.getvalue()

    @cached_property
    def svg(self) -> bytes:
        """The page as SVG, sharp on every screen; the same bytes for the same figure."""
        import matplotlib

        page = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "ddpkit"}):
            self.figure.savefig(page, format="svg", metadata={"Date": None})
        return page.getvalue()


# Charts: matplotlib places title, axes and legend.


def chart(title: str, height: float = HEIGHT, rows: int = 1, columns: int = 1, **options):
    """(figure, list of its axes), the title above. options: of `Figure.subplots`."""
    from matplotlib.figure import Figure

    size = WIDEST / DPI, height / DPI
    figure = Figure(size, dpi=DPI, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    figure.suptitle(title, fontsize=LARGE, weight="bold")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.tick_params(labelsize=SMALL)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.label.set_size(NORMAL)
    return figure, list(grid.flat)


def legend(figure, handles: Sequence) -> None:
    """Say below the axes what is what, in as many columns as there is room for."""
    for columns in range(len(handles), 0, -1):
        style = {"loc": "outside lower center", "frameon": False, "fontsize": SMALL}
        made = figure.legend(handles=handles, ncols=columns, **style)
        if columns == 1 or made.get_window_extent().width < figure.bbox.width:
            return
        made.remove()


def patch(label: str, fill: str, edge: str = "black"):
    """A box of a legend."""
    from matplotlib.patches import Patch

    return Patch(fc=fill, ec=edge, label=label)


def stroke(label: str, fill: str = "black", **style):
    """A line of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **({"color": fill, "lw": 3} | style))


def with_units(axis, unit: str) -> None:
    """Say the ticks of an axis as 10 µs or 25 MB. unit: s or B."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(unit))


def write_on(axes, x: float, y: float, text: str, fill: str, **style) -> None:
    """Centred on something of this colour, which also hides what lies below the text."""
    under = {"fc": fill, "ec": "none", "pad": 1}
    style = {"ha": "center", "va": "center", "fontsize": SMALL, "bbox": under} | style
    axes.text(x, y, text, color=ink(fill), **style)


def write_after(axes, x: float, y: float, text: str, **style) -> None:
    """To the right of the end of a bar."""
    style = {"va": "center", "fontsize": SMALL, "bbox": WHITE, "zorder": 4} | style
    axes.annotate(text, (x, y), (8, 0), textcoords="offset points", **style)


def log_y(axes, label: str, unit: str) -> None:
    """A logarithmic axis with a grid; several ticks also where it is short. unit: s or B."""
    axes.set_yscale("log")
    axes.minorticks_off()
    if axes.get_ylim()[1] < 100 * axes.get_ylim()[0]:
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    with_units(axes.yaxis, unit)
    axes.set_ylabel(label)
    axes.grid(color=FAINT, lw=0.6)


def by_tokens(axes, lengths: Sequence[int]) -> None:
    """A logarithmic axis of the lengths of sequences."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length of the sequence (tokens)")


# The canvas: what has no axes is placed in pixels.


class Canvas:
    """A white page measured in pixels from its upper left corner."""

    def __init__(self, width: float, height: float):
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.set_axis_off()
        self._layers = itertools.count(1)  # what is drawn later lies above

    def picture(self, text: str) -> Picture:
        return Picture(self.figure, text)

    def box(self, x, y, width, height, fill=EMPTY, edge="black", line=1.5, dashed=False, round=0):
        from matplotlib.patches import FancyBboxPatch

        shape = f"round,pad=0,rounding_size={round}" if round else "square,pad=0"
        style = {"fc": fill, "ec": edge, "lw": line, "ls": DASHES if dashed else "solid"}
        self._add(FancyBboxPatch((x, y), width, height, shape, **style))

    def _add(self, shape):
        shape.set_zorder(next(self._layers))
        self.axes.add_patch(shape)

    def text(self, x, y, text, points=SMALL, align="center", ink="black", bold=False):
        style = {"fontsize": points, "ha": align, "va": "center_baseline", "color": ink}
        weight = "bold" if bold else "normal"
        self.axes.text(x, y, text, zorder=next(self._layers), weight=weight, **style)

    def line(self, points, ink="black", line=1.5, dashed=False):
        style = {"color": ink, "lw": line, "ls": DASHES if dashed else "solid"}
        x, y = zip(*points, strict=True)
        self.axes.plot(x, y, zorder=next(self._layers), solid_joinstyle="round", **style)

    def arrow(self, start, end, ink="black", line=3.0, dashed=False):
        from matplotlib.patches import FancyArrowPatch

        if dashed:
            shape = f"->,head_length={2 * line},head_width={1.4 * line}"
            style = {"lw": line, "ls": DASHES}
        else:
            shape = f"simple,head_length={4 * line},head_width={4 * line},tail_width={line}"
            style = {"lw": 0}
        style |= {"arrowstyle": shape, "color": ink, "shrinkA": 0, "shrinkB": 0}
        self._add(FancyArrowPatch(start, end, **style))

    def badge(self, x, y, rank, width=84, height=36):
        """The label of a rank, in its colour."""
        fill = colour(rank)
        self.box(x, y, width, height, fill, round=6)
        self.text(x + width / 2, y + height / 2, f"rank {rank}", ink=ink(fill), bold=True)

    def key(self, x, y, fill, text):
        """A box of a legend and what it says."""
        self.box(x, y, 30, 20, fill)
        self.text(x + 40, y + 10, text, align="left")

    def cells(self, x, y, values, owners, width, height=36, per_line=None, marked=()):
        """Numbers side by side in the colours of their owners; None is an empty box.

        marked: the indices of those that are framed, in order.
        """
        per_line = per_line or len(values)
        for index, (value, owner) in enumerate(zip(values, owners, strict=True)):
            left, top = x + index % per_line * width, y + index // per_line * height
            known = value is not None
            fill = colour(owner) if known and owner != "blank" else EMPTY
            edge = FAINT
            if known:
                edge = "black" if ink(fill) == "black" else GREY
            self.box(left, top, width, height, fill, edge, 1.2, dashed=not known)
            self.text(left + width / 2, top + height / 2, number(value), ink=ink(fill))
        for line, group in itertools.groupby(marked, lambda index: index // per_line):
            indices = list(group)
            left, top = x + indices[0] % per_line * width, y + line * height
            self.box(left, top, len(indices) * width, height, "none", "black", 4)


def cell_width(*rows: Sequence | None) -> float:
    """Wide enough for the longest number in any of the rows."""
    lengths = [len(number(value)) for row in rows for value in row or ()]
    return max(44, max(lengths, default=1) * DIGIT + 8)
