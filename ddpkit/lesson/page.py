"""Drawing tools for all figures: colours, sizes, a canvas in pixels, charts with axes.

A rank has the same colour and label in every figure. A finished figure, with its alt text, is a
`Picture`. Give no text a size below 14 points (`SMALL`); a pixel of the canvas is 0.75 points.
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
HEIGHT = 560  # pixels of a chart
SMALL, NORMAL, LARGE = 14, 16, 18  # points
DIGIT = 12.2  # width in pixels of a digit of SMALL text

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart, and a ninth
# of Tol's, for a server with eight workers.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, RED, YELLOW, BLACK = "#56B4E9", "#D55E00", "#F0E442", "#000000"
WINE = "#882255"
RANK_COLOURS = [BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, BLACK, WINE]
MIXED = "#DDDDDD"  # data of several ranks
EMPTY, PALE, FAINT, GREY = "#FFFFFF", "#F4F4F4", "#AAAAAA", "#666666"
WRONG = "#C8102E"
PALER = 0.3  # how much of a colour is mixed with white
WEIGHTS = 0.2126, 0.7152, 0.0722  # of red, green, blue in a colour's lightness
MARKERS = "osD^v"
DASHES = (0, (3, 2))
WHITE = {"fc": "white", "ec": "none", "pad": 3}  # behind text that lies on a chart


def colour(rank: int | frozenset[int] | None) -> str:
    """Return the colour, "#RRGGBB", in which the data of a rank is drawn.

    rank: a rank. From rank 9 on colours repeat, so labels must tell ranks apart. A frozenset of
        ranks stands for a number that combines numbers of these ranks, such as their sum, and gives
        white, on which `Canvas.cells` draws a stripe for each rank. None gives grey: it isn't known
        from which rank or ranks the number came.
    """
    if isinstance(rank, frozenset):
        return EMPTY
    return MIXED if rank is None else RANK_COLOURS[rank % len(RANK_COLOURS)]


def dark(fill) -> str:
    """Return the colour `fill` as "#RRGGBB", darkened until a line of it stands out on white.

    Its contrast with white, by W3C's formula, is then at least 3:1. White itself stays white, since
    white lines are gaps between shapes. fill: a colour in any form that matplotlib accepts.
    """
    from matplotlib.colors import to_hex, to_rgb

    def light(value: float) -> float:  # W3C's relative luminance
        return value / 12.92 if value <= 0.04 else ((value + 0.055) / 1.055) ** 2.4

    parts = to_rgb(fill)
    while sum(parts) < 3 and sum(map(operator.mul, WEIGHTS, map(light, parts))) > 0.3:
        parts = [0.97 * value for value in parts]
    return to_hex(parts).upper()


def ink(fill: str) -> str:
    """Return the colour of text on `fill`, so that it is legible: "white" or "black".

    It is "white" on this module's BLUE, BLACK, WINE and WRONG (a red), otherwise "black".
    """
    return "white" if fill in (BLUE, BLACK, WINE, WRONG) else "black"


class Picture:
    """A drawn figure with its alt text, on a white background, legible in light and dark themes.

    A notebook cell shows its `png`, which for sharp screens has twice the pixels of the shown width
    and height, and shrinks to fit a narrow window. Widgets show its `svg`, in which boxes and texts
    of a `Canvas` can slide from one place to another. `png` and `svg` are bytes.

    figure: a finished matplotlib figure. Making the Picture changes it: it gets a grey frame, lines
        and arrows too pale for white are darkened, and its layout is computed and then kept.
    text: what the figure shows, in words, for screen readers and stored notebooks.
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
        """Return an <img> with the PNG and its alt text, which JupyterLab's own <img> lacks."""
        width = self.size[0]
        source = f"data:image/png;base64,{base64.b64encode(self.png).decode()}"
        style = f"width: {width}px; max-width: min(100%, {WIDEST}px); height: auto"
        return f'<img alt="{html.escape(self.text)}" style="{style}" src="{source}">'

    @property
    def metadata(self) -> dict:
        """Return the size in pixels at which Jupyter shows the PNG, and its alt text.

        It is {"image/png": {"width": ..., "height": ..., "alt": ...}}.
        """
        width, height = self.size
        return {"image/png": {"width": width, "height": height, "alt": self.text}}

    @property
    def size(self) -> tuple[int, int]:
        """Return (width, height) as shown, in pixels; the PNG is twice as wide and as high."""
        width, height = self.figure.bbox.size
        return round(width), round(height)

    @cached_property
    def png(self) -> bytes:
        """Return the figure as a PNG of 128 colours, about half the bytes of full colour."""
        from PIL import Image

        raw, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(raw, dpi=2 * DPI, format="png", pil_kwargs={"compress_level": 0})
        image = Image.open(raw).convert("RGB")
        sample = image.resize(self.size, Image.Resampling.NEAREST)
        palette = sample.quantize(128, Image.Quantize.MEDIANCUT)
        image.quantize(palette=palette, dither=0).save(small, "png")
        return small.getvalue()

    @cached_property
    def svg(self) -> bytes:
        """Return the figure as SVG, without dates and random ids: in every run the same bytes."""
        import matplotlib

        page = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "ddpkit"}):
            self.figure.savefig(page, format="svg", metadata={"Date": None, "Title": self.text})
        return page.getvalue()


# Charts: matplotlib places title, axes and legend.


def chart(title: str, height: float = HEIGHT, rows: int = 1, columns: int = 1, **options):
    """Make a matplotlib figure with a grid of charts; return (figure, list of its axes).

    The figure is 960 pixels wide (`card.WIDEST`), and the axes are listed row by row.

    title: the heading above all charts. height: the figure's height in pixels.
    rows, columns: the size of the grid. options: passed to matplotlib's `Figure.subplots`.
    """
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
    """Put a legend below the charts of a figure, in as many columns as fit.

    handles: the entries, which are matplotlib artists with a label, such as `patch` and `stroke`
        return. Without any, the legend explains all that has a label in the figure's first chart.
    """
    handles = handles or figure.axes[0].get_legend_handles_labels()[0]
    for columns in range(len(handles), 0, -1):
        style = {"loc": "outside lower center", "frameon": False, "fontsize": SMALL}
        made = figure.legend(handles=handles, ncols=columns, **style)
        if columns == 1 or made.get_window_extent().width < figure.bbox.width:
            return
        made.remove()


def patch(label: str, fill: str, edge: str = "black"):
    """Return an entry for `legend`: a matplotlib `Patch` with a label. fill, edge: colours."""
    from matplotlib.patches import Patch

    return Patch(fc=fill, ec=edge, label=label)


def stroke(label: str, fill: str = "black", **style):
    """Return an entry for `legend` (of this module): a matplotlib `Line2D` with a label.

    fill: the line's colour. style: further options of `Line2D`.
    """
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **({"color": fill, "lw": 3} | style))


def with_units(axis, unit: str) -> None:
    """Make a matplotlib axis write its ticks with units, such as "10 µs" or "25 MB".

    axis: `axes.xaxis` or `axes.yaxis`. unit: "s", "B", or "" for a prefix alone, such as "10 k".
    """
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(unit))


def write_on(axes, x: float, y: float, text: str, fill: str, **style) -> None:
    """Write text centred at (x, y), in black or white, whichever is legible on `fill`.

    fill: the colour of the shape that is there already. A box of this colour behind the text hides
        lines that were drawn there.
    axes: matplotlib's chart. x, y: the position in data coordinates.
    style: options of matplotlib's `Axes.text`.
    """
    under = {"fc": fill, "ec": "none", "pad": 1}
    style = {"ha": "center", "va": "center", "fontsize": SMALL, "bbox": under} | style
    axes.text(x, y, text, color=ink(fill), **style)


def write_after(axes, x: float, y: float, text: str, **style) -> None:
    """Write text to the right of (x, y), the end of a bar, on a white background.

    axes: matplotlib's chart. x, y: the position in data coordinates.
    style: options of matplotlib's `Axes.annotate`.
    """
    style = {"va": "center", "fontsize": SMALL, "bbox": WHITE, "zorder": 4} | style
    axes.annotate(text, (x, y), (8, 0), textcoords="offset points", **style)


def log_y(axes, label: str, unit: str) -> None:
    """Make the y axis logarithmic, with a grid, and with several ticks even if its range is short.

    Call this once the data is drawn, because the data's range decides where the ticks are.

    label: the axis's name. unit: that of the data, "s" or "B"; ticks read "10 ms" or "1 MB", say.
    """
    axes.set_yscale("log")
    axes.minorticks_off()
    if axes.get_ylim()[1] < 100 * axes.get_ylim()[0]:
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    with_units(axes.yaxis, unit)
    axes.set_ylabel(label)
    axes.grid(color=FAINT, lw=0.6)


def by_tokens(axes, lengths: Sequence[int]) -> None:
    """Make the x axis logarithmic, with a tick at each of `lengths`, and label it.

    lengths: lengths of sequences, in tokens.
    """
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length of the sequence (tokens)")


# The canvas, for drawings without axes, is measured in pixels.

ROW = 36  # height in pixels of a line of numbers


class Canvas:
    """A white page to draw on, measured in pixels from its upper left corner.

    Later shapes cover earlier ones, but texts lie above all shapes. `picture` returns the result.

    width, height: the size of the page, in pixels.
    gid: None at first. While the caller has set it to what `moving(start, end)` returned, boxes and
        texts are drawn so that they slide once, from `start` to `end`, when a widget shows the
        picture, as messages do. `moving` says how the two are measured.
    """

    def __init__(self, width: float, height: float):
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D

        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
        self.pixels = Affine2D().scale(1 / width, -1 / height).translate(0, 1)
        self.pixels += self.figure.transFigure
        self.gid: str | None = None  # the SVG's id of boxes and texts drawn from now on: `moving`

    def picture(self, text: str) -> Picture:
        """Return what was drawn as a `Picture`. text: what it shows, in words: its alt text."""
        return Picture(self.figure, text)

    def box(self, x, y, width, height, fill=EMPTY, edge="black", line=1.5, dashed=False, round=0):
        """Draw a box whose upper left corner is (x, y).

        x, y, width, height: in pixels. fill, edge: colours, or "none"; the default fill is white,
            and an edge too pale to stand out on white is darkened, unless it is white itself.
        line: width of the edge, in points. dashed: whether the edge is dashed.
        round: radius of the corners, in pixels.
        """
        from matplotlib.patches import FancyBboxPatch

        shape = f"round,pad=0,rounding_size={round}" if round else "square,pad=0"
        edge = edge if edge == "none" else dark(edge)
        style = {"fc": fill, "ec": edge, "lw": line, "ls": DASHES if dashed else "solid"}
        style |= {"gid": self.gid, "zorder": 1, "transform": self.pixels}
        self.figure.add_artist(FancyBboxPatch((x, y), width, height, shape, **style))

    def text(self, x, y, text, points=SMALL, align="center", ink="black", bold=False):
        """Write a line of text, vertically centred at y.

        x, y: in pixels. points: the size of the letters. ink: their colour.
        align: which part of the text is at x: its "left" end, "center" or "right" end.
        """
        style = {"fontsize": points, "ha": align, "va": "center_baseline", "color": ink}
        weight = "bold" if bold else "normal"
        style |= {"gid": self.gid, "zorder": 1, "transform": self.pixels}
        self.figure.text(x, y, text, weight=weight, **style)

    def line(self, points, ink, line=1.5):
        """Draw a line through `points`, a list of (x, y) in pixels.

        ink: its colour, as matplotlib takes it. line: how thick it is, in points.
        """
        from matplotlib.lines import Line2D

        style = {"color": ink, "lw": line, "zorder": 1, "transform": self.pixels}
        self.figure.add_artist(Line2D(*zip(*points, strict=True), **style))

    def arrow(self, start, end, ink="black", line=3.0, dashed=False):
        """Draw an arrow from `start` to `end`, each (x, y) in pixels.

        ink: its colour, as matplotlib takes it. line: how thick it is, in points.
        """
        from matplotlib.patches import FancyArrowPatch

        style = {"color": ink, "lw": line, "ls": DASHES if dashed else "solid", "zorder": 1}
        shape = {"arrowstyle": "-|>", "mutation_scale": 10 + 3 * line, "shrinkA": 0, "shrinkB": 0}
        arrow = FancyArrowPatch(start, end, transform=self.pixels, **shape, **style)
        self.figure.add_artist(arrow)

    def badge(self, x, y, rank):
        """Draw a label such as "rank 2" in the rank's colour, 84 pixels wide and 36 (`ROW`) high.

        x, y: the label's upper left corner, in pixels.
        """
        fill = colour(rank)
        self.box(x, y, 84, ROW, fill, round=6)
        self.text(x + 42, y + ROW / 2, f"rank {rank}", ink=ink(fill), bold=True)

    def key(self, x, y, fill, text):
        """Draw an entry of a legend: a box of colour `fill`, and its text on the right.

        x, y: the upper left corner of the box, in pixels.
        """
        self.box(x, y, 30, 20, fill)
        self.text(x + 40, y + 10, text, align="left")

    def mixed_key(self):
        """Draw at the foot of the page, for grey boxes, a legend entry: "data of several ranks"."""
        self.key(16, self.height - 32, MIXED, "data of several ranks")

    def cells(self, x, y, values, owners, width, per_line=None, marked=()):
        """Draw numbers side by side, each in a box of its owner's colour.

        x, y: the upper left corner of the first box, in pixels. width: of a box, in pixels.
        values: the numbers. A None among them is drawn as an empty, dashed box; for an empty list
            or None, one such box is drawn, and `owners` isn't used.
        owners: a list with, for each number, the rank that it came from; a frozenset of ranks if it
            combines theirs, drawn as stripes for these; or None, drawn in grey, if that is unknown.
        per_line: after how many boxes a new line begins; by default never. Boxes are 36 (ROW)
            pixels high, and there is no gap between lines.
        marked: the indices of the numbers that get a thick frame.
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
        """Divide a box into a slot for each of `ranks`, and fill the slots of those in `filled`.

        A slot is filled in its rank's colour; nothing is drawn in the slots of other ranks.

        x, y, width, height: the upper left corner and the size of the box, in pixels.
        ranks: the ranks that have a slot, from left to right. filled: some of these ranks.
        """
        wide = width / len(ranks)
        for place, rank in enumerate(ranks):
            if rank in filled:
                self.box(x + wide * place, y, wide, height, colour(rank), "none", 0)


def moving(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return a value for `Canvas.gid` that makes shapes move when a widget shows their picture.

    Boxes and texts, but no lines or arrows, that are drawn while `gid` has this value travel from
    `start` to `end`, and stay there. start, end: offsets (x, y), right and down, from the place
    where a shape is drawn, which is also where the PNG shows it. They are in points, the unit of
    the SVG: a pixel of the canvas is 0.75 points (72 / DPI).
    """
    return "from {:.1f} {:.1f} to {:.1f} {:.1f}".format(*start, *end).replace("-0.0", "0.0")


def cell_width(*rows: Sequence | None) -> float:
    """Return how wide the boxes of `Canvas.cells` must be, in pixels, for all these numbers to fit.

    The longest number, as it is written, decides; the result is at least 44.
    rows: lists of numbers; a row that is None counts as empty.
    """
    lengths = [len(number(value)) for row in rows for value in row or ()]
    return max(44, max(lengths, default=1) * DIGIT + 8)
