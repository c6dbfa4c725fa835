"""The course as plain HTML, from the notebooks' stored outputs: `make site`.

The pages open from the file system, without a server, a kernel or a network, so formulas become
MathML.
"""

import html
import re
from pathlib import Path

import latex2mathml.converter
import nbformat
from nbconvert import HTMLExporter
from nbformat import NotebookNode

from ddpkit.lesson.card import card

ROOT = Path(__file__).resolve().parents[1]
STILL = (
    "*Players and calculators stand still on this page, at one telling picture. They live in "
    "JupyterLab, where* `make lab` *opens them.*"
)
STYLE = """<style>
mtable[displaystyle] mtd:nth-child(odd) { text-align: right; padding-left: 1em }
mtable[displaystyle] mtd:nth-child(even) { text-align: left }
img { max-width: 100%; height: auto }
blockquote { border-left: 4px solid #0072b2; background: #f2f7fb; padding: 0.3em 1em }
</style>"""
NO_ALT = 'alt="No description has been provided for this image"'
SAYS = re.compile(r"predict(\.score)?\(|\.answer\(|check\.")  # a cell with a card
SAID = re.compile(r"([✓✗]?) ?(\w+(?: on [^:]+)?|Your prediction): (.*)", re.DOTALL)
INDEX = """<!doctype html><html lang="en"><meta charset="utf-8"><title>ddpkit</title>
<style>body {{ font: 18px/1.5 sans-serif; max-width: 44em; margin: 3em auto }}</style>
<h1>Distributed training, built by hand</h1>
<p>Notebooks in which you build distributed training yourself. Every rank is a real process on your
own machine, every message is counted, and every claim is a cell. These pages are for reading; to
run them, <code>make lab</code>.</p>
<dl>{entries}</dl></html>
"""


def formulas(markdown: str) -> str:
    """Turn `$...$` and `$$...$$` into MathML, outside code."""

    def mathml(match: re.Match) -> str:
        if match["code"]:
            return match["code"]
        latex = (match["block"] or match["inline"]).replace("{aligned}", "{align*}")
        display = "block" if match["block"] else "inline"
        return latex2mathml.converter.convert(latex, display=display).replace("\n", " ")

    code, block, inline = (
        r"(?P<code>```.*?```|`[^`]*`)",
        r"\$\$(?P<block>.+?)\$\$",
        r"\$(?P<inline>[^$]+)\$",
    )
    return re.sub(f"{code}|{block}|{inline}", mathml, markdown, flags=re.DOTALL)


def cards(notebook: NotebookNode) -> None:
    """Set the words of checks and predictions on the cards that they have in JupyterLab."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []) if SAYS.search(cell.source) else []:
            data = output.get("data", {})
            if "text/plain" in data and "image/png" not in data:
                found = SAID.match(data["text/plain"])
                sign, *said = found.groups() if found else ("", data["text/plain"])
                data["text/html"] = card({"✓": True, "✗": False}.get(sign), *said)


def page(notebook: NotebookNode) -> str:
    """Convert the notebook to HTML; links to other notebooks lead to their pages."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = formulas(re.sub(r"(\]\([\w./]+)\.ipynb", r"\1.html", cell.source))
    cards(notebook)
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(f"{STILL}\n\n{STYLE}"))
    exporter = HTMLExporter(template_name="lab", mathjax_url="", require_js_url="")
    body, _ = exporter.from_notebook_node(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:  # nbconvert says that there is no description
                body = body.replace(NO_ALT, f'alt="{html.escape(data["text/plain"])}"', 1)
    return body


def entry(name: str, notebook: NotebookNode) -> str:
    """Write the notebook's line in the index: its title, and what you will build."""
    first = notebook.cells[0].source
    title = re.search(r"# (.*)", first)[1]
    build = re.search(r"\*\*You will build:\*\* (.*)", first)[1].replace("*", "")
    return f'<dt><a href="{name}.html">{html.escape(title)}</a></dt><dd>{html.escape(build)}</dd>'


def build(source: Path, target: Path) -> None:
    """Write a page for each notebook, and an index."""
    target.mkdir(exist_ok=True)
    entries = []
    for path in sorted(source.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        entries.append(entry(path.stem, notebook))
        (target / f"{path.stem}.html").write_text(page(notebook), encoding="utf-8")
    (target / "index.html").write_text(INDEX.format(entries="\n".join(entries)), encoding="utf-8")


if __name__ == "__main__":
    build(ROOT / "notebooks", ROOT / "site")
    print("open site/index.html")
