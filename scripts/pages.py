"""The course as plain HTML: `make site`.

Text, numbers and pictures are the notebooks' stored outputs. Each notebook is run once more for the
frames of its players, which then step without a kernel. The pages open from the file system,
without a server or a network, so formulas become MathML. With --still no notebook is run.
"""

import base64
import html
import re
import sys
from pathlib import Path

import latex2mathml.converter
import nbformat
import refresh
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from ddpkit.lesson.card import card

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STILL = (
    "Players step on this page; calculators stand still, at one telling picture. They live in "
    "JupyterLab, where <code>make lab</code> opens them."
)
VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
SAYS = re.compile(r"predict(\.score)?\(|\.answer\(|check\.")  # a cell with a card
SAID = re.compile(r"([✓✗]?) ?(\w+(?: on [^:]+)?|Your prediction): (.*)", re.DOTALL)
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{style}</style>
{body}
<script>{script}</script></html>
"""
WELCOME = """<h1>Distributed training, built by hand</h1>
<p>Notebooks in which you build distributed training yourself. Every rank is a real process on your
own machine, every message is counted, and every claim is a cell. These pages are for reading; to
run them, <code>make lab</code>.</p>"""


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


def players(ran: NotebookNode) -> dict[str, list[tuple[str, str]]]:
    """{id of a cell: the frames, (caption, picture) in HTML, of the player that it has shown}."""
    widgets = ran.metadata.get("widgets", {}).get(STATE, {}).get("state", {})

    def below(model_id: str) -> list[str]:
        children = widgets[model_id]["state"].get("children", [])
        return [child.removeprefix("IPY_MODEL_") for child in children]

    found = {}
    for cell in ran.cells:
        for output in cell.get("outputs", []):
            look_at = [output.get("data", {}).get(VIEW, {}).get("model_id")]
            while look_at and look_at[0] in widgets:
                model_id, *look_at = look_at
                if widgets[model_id]["model_name"] == "StackModel":
                    pages = dict.fromkeys(below(model_id))  # one may stand for several steps
                    values = (
                        [widgets[part]["state"]["value"] for part in below(at)] for at in pages
                    )
                    found[cell.id] = [tuple(value) for value in values]
                    break
                look_at += below(model_id)
    return found


def put_players(notebook: NotebookNode, frames: dict[str, list[tuple[str, str]]]) -> None:
    """Set players into the place of their stored pictures."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []) if cell.get("id") in frames else []:
            data = output.get("data", {})
            if "image/png" in data:
                shown = (f'<div class="frame">{"".join(frame)}</div>' for frame in frames[cell.id])
                data["text/html"] = f'<figure class="player">{"".join(shown)}</figure>'


def pictures(notebook: NotebookNode) -> None:
    """Give each picture its width on the page, and the text that stands for it."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data and "text/html" not in data:
                width = output.metadata.get("image/png", {}).get("width", "")
                source = "data:image/png;base64," + "".join(data["image/png"].split())
                alt = html.escape(data.get("text/plain", ""))
                data["text/html"] = f'<img width="{width}" alt="{alt}" src="{source}">'


def fold(notebook: NotebookNode) -> None:
    """Put the code that JupyterLab keeps folded, a notebook's imports, behind a click."""
    shown = []
    for cell in notebook.cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            code = highlight(cell.source, PythonLexer(), HtmlFormatter())
            folded = f"<details><summary>Imports</summary>{code}</details>"
            shown.append(nbformat.v4.new_markdown_cell(folded))
            cell.metadata["transient"] = {"remove_source": True}
        shown.append(cell)
    notebook.cells = shown


def page(notebook: NotebookNode, frames: dict[str, list[tuple[str, str]]]) -> str:
    """Convert the notebook to HTML; links to other notebooks lead to their pages."""
    title = re.search("# (.*)", notebook.cells[0].source)[1]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = formulas(re.sub(r"(\]\([\w./]+)\.ipynb", r"\1.html", cell.source))
    cards(notebook)
    put_players(notebook, frames)
    pictures(notebook)
    fold(notebook)
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True)
    exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(notebook)
    top = f'<nav><a href="index.html">All notebooks</a></nav><p class="note">{STILL}</p>'
    return whole(title, f"{top}<main>{body}</main>")


def whole(title: str, body: str) -> str:
    """Write a page that needs no other file."""
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    own = (HERE / "site.css").read_text(encoding="utf-8")
    style = f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{own}"
    script = (HERE / "site.js").read_text(encoding="utf-8")
    return PAGE.format(title=html.escape(title), style=style, body=body, script=script)


def entry(name: str, notebook: NotebookNode) -> str:
    """Write the notebook's card on the index: its first picture, its title, what you will build."""
    prose = "\n".join(cell.source for cell in notebook.cells[:4])
    title = re.search(r"# (.*)", prose)[1]
    build = re.search(r"\*\*You will build:\*\* (.*)", prose)[1].replace("*", "")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    found = (output.get("data", {}).get("image/png") for output in outputs)
    picture = next(filter(None, found), "")
    thumbnail = f'<img alt="" src="data:image/png;base64,{"".join(picture.split())}">' * bool(
        picture
    )
    words = f"<b>{html.escape(title)}</b><br><small>{html.escape(build)}</small>"
    return f'<a href="{name}.html">{thumbnail}<span>{words}</span></a>'


def build(source: Path, target: Path, run: bool = True) -> None:
    """Write a page for each notebook, and an index. run: the notebooks, for their players."""
    target.mkdir(exist_ok=True)
    entries = []
    for path in sorted(source.glob("*.ipynb")):
        print(path.name, flush=True)
        notebook = nbformat.read(path, as_version=4)
        frames = {}
        if run:
            ran = nbformat.read(path, as_version=4)
            refresh.run(ran, path.parent)
            refresh.refuse_large(ran)
            frames = players(ran)
        entries.append(entry(path.stem, notebook))
        (target / f"{path.stem}.html").write_text(page(notebook, frames), encoding="utf-8")
    ring = base64.b64encode((ROOT / "docs/ring.svg").read_bytes()).decode()
    hero = f'<img alt="A ring of four ranks" src="data:image/svg+xml;base64,{ring}">'
    shelf = f'<div class="shelf">{"".join(entries)}</div>'
    index = whole("ddpkit", f"<main>{WELCOME}{hero}{shelf}</main>")
    (target / "index.html").write_text(index, encoding="utf-8")


if __name__ == "__main__":
    build(ROOT / "notebooks", ROOT / "site", run="--still" not in sys.argv)
    print("open site/index.html")
