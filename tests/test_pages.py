"""The course as plain HTML: read from the file system, without a kernel or a network."""

import re

import pytest
from test_browser import BROWSER, FLAGS

nbformat = pytest.importorskip("nbformat", reason="Jupyter isn't installed")
pages = pytest.importorskip("pages")

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)
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
        nbformat.v4.new_code_cell(
            "import os\nimport ddpkit", metadata={"jupyter": {"source_hidden": True}}
        ),
        nbformat.v4.new_code_cell("player(run)", outputs=[picture]),
        nbformat.v4.new_code_cell("check.ring(ring)", outputs=[said]),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source / "00_first.ipynb")
    pages.build(source, tmp_path / "site", run=False)

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
    assert "overflow-x: auto" in page
    folded = re.search("<details><summary>Imports</summary>(.*?)</details>", page, re.DOTALL)[1]
    assert re.sub("<[^>]*>", "", folded).split() == ["import", "os", "import", "ddpkit"]
    assert len(re.findall(r">ddpkit</span>", page)) == 1
    assert not re.search(r'(src|href)="https?:', page)
    index = (tmp_path / "site" / "index.html").read_text()
    assert '<a href="00_first.html"><img alt="" src="data:image/png;base64,iVBORw0K">' in index
    assert "<b>00 · First</b><br><small>something.</small>" in index
    assert not re.search(r'(src|href)="https?:', index)


PLAYER = """from ddpkit import launch, ring
from ddpkit.lesson.player import player
import torch, torch.distributed as dist
def talk():
    return ring.ring_all_reduce(torch.full((3,), 10.0 ** dist.get_rank()))
player(launch(talk, world_size=3, keep_values=True), by_hop=True)"""
TABLE = "| a | b |\n|---|---|\n" + f"| {'wide ' * 30}| $\\sum_{{i=1}}^n x_i{' + x_i' * 40}$ |"
LOOK = """() => [document.documentElement.scrollWidth, [...document.querySelectorAll('.frame')]
    .map(each => each.checkVisibility()), getComputedStyle(document.body).backgroundColor]"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A page whose notebook was stored with a still picture and is run for its player."""
    source = tmp_path_factory.mktemp("site") / "notebooks"
    source.mkdir()
    picture = nbformat.v4.new_output("execute_result", {"image/png": PIXEL, "text/plain": "3 hops"})
    cells = [
        nbformat.v4.new_markdown_cell(FIRST),
        nbformat.v4.new_markdown_cell(TABLE),
        nbformat.v4.new_code_cell(PLAYER, outputs=[picture]),
        nbformat.v4.new_code_cell("print('long ' * 99)"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source / "00_first.ipynb")
    pages.build(source, source.parent / "site")
    return source.parent / "site"


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.wide
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("scripts", [True, False])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_a_page_and_its_player_steps(site, chromium, scripts, scheme):
    size = {"width": 390, "height": 800}
    page = chromium.new_page(viewport=size, java_script_enabled=scripts, color_scheme=scheme)
    page.goto((site / "00_first.html").as_uri())
    wide, shown, ground = page.evaluate(LOOK)
    assert wide <= 390
    assert shown == [True] + [False] * 4
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(13, 17, 23)")
    if scripts:
        page.get_by_role("button", name="one step on").click()
        assert page.evaluate(LOOK)[1].index(True) == 1
        page.keyboard.press("ArrowRight")
        assert page.evaluate(LOOK)[1].index(True) == 2
        page.get_by_role("button", name="play or pause").click()
        page.wait_for_function("document.querySelectorAll('.frame')[4].checkVisibility()")
    page.goto((site / "index.html").as_uri())
    assert page.evaluate(LOOK)[0] <= 390
    page.close()
