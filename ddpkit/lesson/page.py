"""Drawing tools for all figures: colours, sizes, a canvas in pixels, charts with axes, pictures.

A rank has one colour and one label everywhere. No text is smaller than 14 pt.
"""

import base64
import html
import io
import operator
from collections.abc import Sequence
from functools import cached_property

from ..tools.units import number
from .card import WIDEST

DPI = 96  # so a figure's pixel is a pixel of the page, and its 14 pt are 14 pt on the screen
TALLEST = 700
HEIGHT = 560  # of a chart
SMALL, NORMAL, LARGE = 14, 16, 18  # points
DIGIT = 12.2  # width in pixels of a digit of SMALL text

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, BLACK = "#56B4E9", "#D55E00", "#F0E442", "#000000"
RANK_COLOURS = [BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, BLACK]
MIXED = "#DDDDDD"  # data of several ranks
EMPTY, PALE, FAINT, GREY = "#FFFFFF", "#F4F4F4", "#AAAAAA", "#666666"
WRONG = "#C8102E"
PALER = 0.3  # how much of a colour is mixed with white
WEIGHTS = 0.2126, 0.7152, 0.0722  # of red, green, blue in a colour's lightness
MARKERS = "osD^v"
DASHES = (0, (3, 2))
WHITE = {"fc": "white", "ec": "none", "pad": 3}  # behind text that lies on a chart


def colour(rank: int | frozenset[int] | None) -> str:
    """Return the colour of `rank`; white for a sum of several, which has stripes; grey for None.

    From rank 8 on colours repeat: labels differ.
    """
    if isinstance(rank, frozenset):
        return EMPTY
    return MIXED if rank is None else RANK_COLOURS[rank % len(RANK_COLOURS)]


def dark(fill) -> str:
    """Darken a colour until a line in it has a contrast of 3 on white. White stays white."""
    from matplotlib.colors import to_hex, to_rgb

    def light(value: float) -> float:  # W3C's relative luminance
        return value / 12.92 if value <= 0.04 else ((value + 0.055) / 1.055) ** 2.4

    parts = to_rgb(fill)
    while sum(parts) < 3 and sum(map(operator.mul, WEIGHTS, map(light, parts))) > 0.3:
        parts = [0.97 * value for value in parts]
    return to_hex(parts).upper()


def ink(fill: str) -> str:
    """Choose black or white, whichever is easier to read on `fill`."""
    return "white" if fill in (BLUE, BLACK, WRONG) else "black"


class Picture:
    """A drawn figure and its text, shown on a white card, legible in light and dark themes.

    text: what the figure shows, in words. `png`, at twice the size for sharp screens, is shown in
    cells, where it shrinks to any window; `svg` is for widgets, whose shapes may move.
    """

    def __init__(self, figure, text: str):
        from matplotlib.collections import LineCollection
        from matplotlib.lines import Line2D
        from matplotlib.patches import FancyArrowPatch, Rectangle

        self.figure, self.text = figure, text
        style = {"fill": False, "ec": GREY, "lw": 2.5, "transform": figure.transFigure}
        figure.add_artist(Rectangle((0, 0), 1, 1, zorder=9, **style))
        for artist in figure.findobj():
            if isinstance(artist, LineCollection):
                artist.set_color([dark(edge) for edge in artist.get_color()])
            elif isinstance(artist, Line2D):
                artist.set_color(dark(artist.get_color()))
            elif isinstance(artist, FancyArrowPatch):
                artist.set_color(dark(artist.get_ec()))
        if figure.get_layout_engine():  # once, instead of twice for each format
            figure.get_layout_engine().execute(figure)
            figure.set_layout_engine(None)

    def __repr__(self):
        return self.text

    def _repr_mimebundle_(self, include=None, exclude=None):
        shown = {"text/plain": self.text, "image/png": self.png, "text/html": self.html}
        return shown, self.metadata

    @property
    def html(self) -> str:
        """Return an <img> with the PNG and an alt text, which JupyterLab's own PNG lacks."""
        width = self.size[0]
        source = f"data:image/png;base64,{base64.b64encode(self.png).decode()}"
        style = f"width: {width}px; max-width: min(100%, {WIDEST}px); height: auto"
        return f'<img alt="{html.escape(self.text)}" style="{style}" src="{source}">'

    @property
    def metadata(self) -> dict:
        """Return for Jupyter the size at which the PNG is shown, and its alt text."""
        width, height = self.size
        return {"image/png": {"width": width, "height": height, "alt": self.text}}

    @property
    def size(self) -> tuple[int, int]:
        """Return width and height in pixels, as shown."""
        width, height = self.figure.bbox.size
        return round(width), round(height)

    @cached_property
    def png(self) -> bytes:
        """Return the figure as a PNG of 128 colours, a quarter of the bytes of full colour."""
        from PIL import Image

        raw, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(raw, dpi=2 * DPI, format="rgba")
        width, height = self.size
        image = Image.frombytes("RGBA", (2 * width, 2 * height), raw.getvalue()).convert("RGB")
        sample = image.resize((width, height), Image.Resampling.NEAREST)
        palette = sample.quantize(128, Image.Quantize.MEDIANCUT)
        image.quantize(palette=palette, dither=0).save(small, "png")
        return small.getvalue()

    @cached_property
    def svg(self) -> bytes:
        """Return the figure as SVG, the same bytes each time it is drawn."""
        import matplotlib

        page = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "ddpkit"}):
            self.figure.savefig(page, format="svg", metadata={"Date": None, "Title": self.text})
        return page.getvalue()


# Charts: matplotlib places title, axes and legend.


def chart(title: str, height: float = HEIGHT, rows: int = 1, columns: int = 1, **options):
    """Make a figure with a title; return it and its axes. options: passed to `Figure.subplots`."""
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


def legend(figure, handles: Sequence = ()) -> None:
    """Put a legend below the axes, in as many columns as fit.

    handles: what it explains; none: everything drawn with a label.
    """
    handles = handles or figure.axes[0].get_legend_handles_labels()[0]
    for columns in range(len(handles), 0, -1):
        style = {"loc": "outside lower center", "frameon": False, "fontsize": SMALL}
        made = figure.legend(handles=handles, ncols=columns, **style)
        if columns == 1 or made.get_window_extent().width < figure.bbox.width:
            return
        made.remove()


def patch(label: str, fill: str, edge: str = "black"):
    """Make the legend's entry for a filled box."""
    from matplotlib.patches import Patch

    return Patch(fc=fill, ec=edge, label=label)


def stroke(label: str, fill: str = "black", **style):
    """Make the legend's entry for a line."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **({"color": fill, "lw": 3} | style))


def with_units(axis, unit: str) -> None:
    """Let an axis write its ticks with units, as 10 µs or 25 MB. unit: s or B."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(unit))


def write_on(axes, x: float, y: float, text: str, fill: str, **style) -> None:
    """Write text centred at (x, y), on a shape of colour `fill`, in black or white, as is legible.

    It is backed by that colour, so lines below it don't show.
    """
    under = {"fc": fill, "ec": "none", "pad": 1}
    style = {"ha": "center", "va": "center", "fontsize": SMALL, "bbox": under} | style
    axes.text(x, y, text, color=ink(fill), **style)


def write_after(axes, x: float, y: float, text: str, **style) -> None:
    """Write text to the right of (x, y), the end of a bar."""
    style = {"va": "center", "fontsize": SMALL, "bbox": WHITE, "zorder": 4} | style
    axes.annotate(text, (x, y), (8, 0), textcoords="offset points", **style)


def log_y(axes, label: str, unit: str) -> None:
    """Make a logarithmic axis with a grid, and several ticks even if it is short. unit: s or B."""
    axes.set_yscale("log")
    axes.minorticks_off()
    if axes.get_ylim()[1] < 100 * axes.get_ylim()[0]:
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    with_units(axes.yaxis, unit)
    axes.set_ylabel(label)
    axes.grid(color=FAINT, lw=0.6)


def by_tokens(axes, lengths: Sequence[int]) -> None:
    """Make the x axis logarithmic, with a tick at each of the lengths of sequences."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length of the sequence (tokens)")


# The canvas, for drawings without axes, is measured in pixels.

ROW = 36  # height in pixels of a line of numbers


class Canvas:
    """A white page to draw on, measured in pixels from its upper left corner.

    What is drawn later covers what was drawn before. `picture` ends it.
    """

    def __init__(self, width: float, height: float):
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
        self.pixels = Affine2D().scale(1 / width, -1 / height).translate(0, 1)
        self.pixels += self.figure.transFigure
        self.gid: str | None = None  # of the shapes drawn from now on, in the SVG

    def picture(self, text: str) -> Picture:
        return Picture(self.figure, text)

    def box(self, x, y, width, height, fill=EMPTY, edge="black", line=1.5, dashed=False, round=0):
        from matplotlib.patches import FancyBboxPatch

        shape = f"round,pad=0,rounding_size={round}" if round else "square,pad=0"
        edge = edge if edge == "none" else dark(edge)
        style = {"fc": fill, "ec": edge, "lw": line, "ls": DASHES if dashed else "solid"}
        style |= {"gid": self.gid, "zorder": 1, "transform": self.pixels}
        self.figure.add_artist(FancyBboxPatch((x, y), width, height, shape, **style))

    def text(self, x, y, text, points=SMALL, align="center", ink="black", bold=False):
        style = {"fontsize": points, "ha": align, "va": "center_baseline", "color": ink}
        weight = "bold" if bold else "normal"
        style |= {"gid": self.gid, "zorder": 1, "transform": self.pixels}
        self.figure.text(x, y, text, weight=weight, **style)

    def line(self, points, ink, line=1.5):
        from matplotlib.lines import Line2D

        style = {"color": ink, "lw": line, "zorder": 1, "transform": self.pixels}
        self.figure.add_artist(Line2D(*zip(*points, strict=True), **style))

    def arrow(self, start, end, ink="black", line=3.0, dashed=False):
        from matplotlib.patches import FancyArrowPatch

        style = {"color": ink, "lw": line, "ls": DASHES if dashed else "solid", "zorder": 1}
        shape = {"arrowstyle": "-|>", "mutation_scale": 10 + 3 * line, "shrinkA": 0, "shrinkB": 0}
        arrow = FancyArrowPatch(start, end, transform=self.pixels, **shape, **style)
        self.figure.add_artist(arrow)

    def badge(self, x, y, rank):
        """Draw the label "rank 2" in the rank's colour, 84 pixels wide."""
        fill = colour(rank)
        self.box(x, y, 84, ROW, fill, round=6)
        self.text(x + 42, y + ROW / 2, f"rank {rank}", ink=ink(fill), bold=True)

    def key(self, x, y, fill, text):
        """Draw a box of a legend, and its text."""
        self.box(x, y, 30, 20, fill)
        self.text(x + 40, y + 10, text, align="left")

    def mixed_key(self):
        """Explain, at the foot of the page, that grey cells hold data of several ranks."""
        self.key(16, self.height - 32, MIXED, "data of several ranks")

    def cells(self, x, y, values, owners, width, per_line=None, marked=()):
        """Draw numbers side by side, each in its owner's colour.

        An owner that is a set of ranks gets stripes. None as a number is an empty box, and so are
        no numbers at all. per_line: cells in a line. marked: the indices of the numbers to frame.
        """
        if not values:
            values, owners = [None], [None]
        per_line = per_line or len(values)
        places = range(len(values))
        for index in sorted(places, key=lambda index: index in marked):  # frames lie above
            value, owner = values[index], owners[index]
            left, top = x + index % per_line * width, y + index // per_line * ROW
            known = value is not None
            fill = colour(owner) if known else EMPTY
            edge = GREY if ink(fill) == "white" else "black" if known else FAINT
            line = 1.2
            if index in marked:
                edge, line = "black", 4
            self.box(left, top, width, ROW, fill, edge, line, dashed=not known)
            middle = top + ROW / 2
            if known and isinstance(owner, frozenset):
                self.stripes(left + 2, top + ROW - 11, width - 4, 9, sorted(owner), owner)
                middle -= 5
            self.text(left + width / 2, middle, number(value), ink=ink(fill))

    def stripes(self, x, y, width, height, ranks, filled):
        """Divide a box into a slot for each of `ranks`, and fill those of the ranks in `filled`."""
        wide = width / len(ranks)
        for place, rank in enumerate(ranks):
            if rank in filled:
                self.box(x + wide * place, y, wide, height, colour(rank), "none", 0)


def moving(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Write the `Canvas.gid` of shapes that travel from `start` to `end` when they appear.

    start, end: offsets from where the shapes are drawn, in SVG's points.
    """
    return "from {:.1f} {:.1f} to {:.1f} {:.1f}".format(*start, *end).replace("-0.0", "0.0")


def cell_width(*rows: Sequence | None) -> float:
    """Return the width of a cell, in pixels, that fits the longest number in any of the rows."""
    lengths = [len(number(value)) for row in rows for value in row or ()]
    return max(44, max(lengths, default=1) * DIGIT + 8)
