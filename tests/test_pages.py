"""The course as plain HTML: read from the file system, without a kernel or a network."""

import re

import pytest

nbformat = pytest.importorskip("nbformat", reason="Jupyter isn't installed")
pages = pytest.importorskip("pages")

FIRST = """# 00 · First

**You will build:** *something*.

[next](01_next.ipynb), and code: `$HOME`"""


def test_a_page_needs_nothing_but_a_browser(tmp_path):
    source = tmp_path / "notebooks"
    source.mkdir()
    picture = nbformat.v4.new_output("display_data", {"image/png": "iVBORw0K", "text/plain": "1."})
    said = nbformat.v4.new_output("execute_result", {"text/plain": "✗ ring on 2 ranks: no <it>"})
    cells = [
        nbformat.v4.new_markdown_cell(FIRST),
        nbformat.v4.new_markdown_cell(
            r"$$\begin{aligned} a &= b^2 \\ &= c \end{aligned}$$ and $x_i$"
        ),
        nbformat.v4.new_code_cell("player(run)", outputs=[picture]),
        nbformat.v4.new_code_cell("check.ring(ring)", outputs=[said]),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source / "00_first.ipynb")
    pages.build(source, tmp_path / "site")

    page = (tmp_path / "site" / "00_first.html").read_text()
    assert 'href="01_next.html"' in page
    assert "<code>$HOME</code>" in page
    assert page.count("<math") == 2
    assert "aligned" not in page
    assert "data:image/png;base64,iVBORw0K" in page
    assert "✗ ring on 2 ranks</b><div" in page
    assert "No &lt;it&gt;</div>" in page
    assert 'alt="1."' in page
    assert "They live in JupyterLab" in page
    assert not re.search(r'(src|href)="https?:', page)
    index = (tmp_path / "site" / "index.html").read_text()
    assert '<a href="00_first.html">00 · First</a></dt><dd>something.</dd>' in index
