"""The table of the parallelisms: what each cuts, what it sends, where its ranks should be.

Notebooks 00 and 15 show it without a highlight; most others highlight the one that they teach.
"""

import html

MAP = {  # what is cut: (its name, what is sent and how often, where the ranks are, notebooks)
    "batch": ("data parallel", "gradients, once a step", "anywhere", "03, 04"),
    "states": ("ZeRO, FSDP", "gradients, weights, each step", "anywhere", "07, 12"),
    "layers": ("pipeline", "activations at a boundary", "neighbours", "10"),
    "width": ("tensor parallel", "activations, 4 times a layer", "one machine", "11"),
    "tokens": ("sequence, context", "activations; keys and values", "near", "11, 13"),
    "experts": ("expert parallel", "tokens, to experts and back", "near", "13"),
}
HEAD = "what is cut", "its name", "what is sent", "ranks are", "notebooks"
WIDTHS = 11, 18, 30, 11  # characters of the text table's columns
LIT = "background: #FFF3C4; color: #111; font-weight: bold"


class Map:
    """The table of parallelisms, shown as HTML in the browser and as text elsewhere.

    Only the HTML has the column with the notebooks' numbers. lit: the row to highlight: "batch",
    "states", "layers", "width", "tokens" or "experts"; None or another text (unchecked): no row.
    """

    def __init__(self, lit: str | None):
        self.lit = lit

    def __repr__(self):
        lines = [_line("  ", ["cut", *HEAD[1:4]])]
        for cut, (*row, _) in MAP.items():
            lines.append(_line("→ " if cut == self.lit else "  ", [cut, *row]))
        return "\n".join(lines)

    def _repr_html_(self):
        rows = [f"<tr>{_cells('th', HEAD)}</tr>"]
        for cut, row in MAP.items():
            style = f' style="{LIT}"' if cut == self.lit else ""
            rows.append(f"<tr{style}>{_cells('td', [cut, *row])}</tr>")
        return f"<table>{''.join(rows)}</table>"


def where(lit: str | None = None) -> Map:
    """Return the table of parallelisms, which a notebook cell shows, with one row highlighted.

    lit: the row to highlight, named by what its parallelism cuts: "batch", "states", "layers",
        "width", "tokens" or "experts"; None for no row.
    ValueError: there is no such row; the message lists all rows.
    """
    if lit is not None and lit not in MAP:
        raise ValueError(f"expected one of {', '.join(MAP)}, got {lit!r}")
    return Map(lit)


def _line(mark: str, words: list[str]) -> str:
    """Return a row of the text table: `mark` ("→ " or two spaces), then four words in columns."""
    padded = [f"{word:{width}}" for word, width in zip(words, WIDTHS, strict=True)]
    return (mark + "".join(padded)).rstrip()


def _cells(kind: str, words) -> str:
    """Return the HTML of a row's cells. kind: "th" or "td". words: the text of each cell."""
    style = "text-align: left; padding: 3px 10px"
    return "".join(f'<{kind} style="{style}">{html.escape(word)}</{kind}>' for word in words)
