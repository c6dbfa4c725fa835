"""What only a browser shows: widgets under the keyboard, the stop button, a restarted kernel.

The cells are the notebooks' own; nbval runs the notebooks themselves.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jupyter_server_config
import psutil
import pytest
from outside import FREEZE_S, wait_until

nbformat = pytest.importorskip("nbformat", reason="Jupyter isn't installed")
working_copy = pytest.importorskip("working_copy")

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
if hasattr(os, "getuid") and os.getuid() == 0:
    FLAGS.append("--no-sandbox")

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"none of these browsers is installed: {', '.join(BROWSERS)}"
)

WIDGETS = {  # notebook: the call in it that shows a widget and needs only imports before it
    "00_start_here": "world_explorer(",
    "05_mixed_precision": "float_explorer(",
    "06_memory": "memory_calculator(",
    "08_online_softmax": "softmax_player(",
}
IMPORT = r"(import|from) [^()]*$"
WAIT = """\
def wait():
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    time.sleep(1e6)
launch(wait, world_size=2, hang_after=1e6)"""
SLEEP_IN_RANKS = "%%ranks 2\nimport time\ntime.sleep(1e6)"
STAY = "%%ranks 4\nx = rank"
ANSWER = "print(6 * 7)"
CHART = "from ddpkit.lesson import charts\ncharts.zero_grid(4)"
ASKED = "from ddpkit.lesson.predict import predict\npredict('Hops?')"
HUNG = WAIT, SLEEP_IN_RANKS


def cells_of_the_notebooks() -> list[str]:
    """A cell that imports, and cells that show a widget each, as the notebooks have them."""
    imports, shown = {"%load_ext ddpkit", "import time"}, []
    for name, call in WIDGETS.items():
        notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
        sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        lines = "\n".join(sources).splitlines()
        imports |= {line for line in lines if re.match(IMPORT, line)}
        shown.append(next(source for source in sources if call in source))
    return ["\n".join(sorted(imports)), *shown]


def write_notebook(path: Path, *sources: str) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells.append(nbformat.v4.new_markdown_cell("Prose."))
    notebook = nbformat.v4.new_notebook(cells=cells)
    path.write_text(working_copy.at_home(nbformat.writes(notebook)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """(address, token, folder) of a JupyterLab with nobody's settings."""
    home = tmp_path_factory.mktemp("jupyter")
    folder = home / "notebooks"
    folder.mkdir()
    (home / "config").mkdir()
    (home / "config/custom").mkdir()
    shutil.copy(ROOT / "scripts/jupyter_server_config.py", home / "config")
    shutil.copy(ROOT / "scripts/custom.css", home / "config/custom")
    (home / "ipython/profile_default").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/ipython_kernel_config.py", home / "ipython/profile_default")
    settings = json.loads((ROOT / "scripts/overrides.json").read_text())  # as make lab brings them
    # Otherwise cells outside the window are not in the page.
    settings["@jupyterlab/notebook-extension:tracker"] = {"windowingMode": "none"}
    for name, values in settings.items():
        file = home / f"settings/{name.replace(':', '/')}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    token = secrets.token_hex(16)
    environment = os.environ | {"JUPYTER_TOKEN": token, "IPYTHONDIR": str(home / "ipython")}
    for name in ("CONFIG", "DATA", "RUNTIME"):
        environment[f"JUPYTER_{name}_DIR"] = str(home / name.lower())
    for name in ("SETTINGS", "WORKSPACES"):
        environment[f"JUPYTERLAB_{name}_DIR"] = str(home / name.lower())
    environment.pop("PYTEST_CURRENT_TEST", None)  # the kernel would behave differently
    options = ["--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"]
    options += ["--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly"]
    command = [sys.executable, "-m", "jupyterlab", *options]
    log = home / "log"
    with log.open("w") as file:
        output = {"stdout": file, "stderr": file}
        server = subprocess.Popen(command, cwd=folder, env=environment, **output)

    def find_address() -> str:
        assert server.poll() is None, log.read_text()
        texts = [file.read_text() for file in (home / "runtime").glob("jpserver-*.json")]
        return json.loads(texts[0])["url"] if texts and texts[0].endswith("}") else ""

    try:
        yield wait_until(find_address), token, folder
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


class Notebook:
    """A notebook open in the browser."""

    def __init__(self, browser, lab, name: str):
        address, token, _ = lab
        self.page = browser.new_page(viewport={"width": 1400, "height": 1000})
        workspace = f"lab/workspaces/{secrets.token_hex(4)}"
        self.page.goto(f"{address}{workspace}/tree/{name}?token={token}")
        self.wait_until_open(name)

    def wait_until_open(self, name: str) -> None:
        self.page.wait_for_function(
            """name => {
                const widget = window.jupyterapp?.shell.currentWidget;
                return widget?.context?.path === name
                    && widget.sessionContext.session?.kernel?.status === 'idle'
                    && widget.content.model.cells.length > 0;
            }""",
            arg=name,
            timeout=60_000,
        )

    def change_to(self, name: str) -> None:
        """Close this notebook, end its kernel, and open another, as by a click on its name."""
        self.page.evaluate(
            """async name => {
                const old = jupyterapp.shell.currentWidget;
                await old.sessionContext.shutdown();
                old.dispose();
                await jupyterapp.commands.execute('docmanager:open', {path: name});
            }""",
            name,
        )
        self.wait_until_open(name)

    def start_cell(self, index: int) -> None:
        """As a click into the cell and Shift-Enter; doesn't wait for it."""
        self.page.evaluate(
            """index => { jupyterapp.shell.currentWidget.content.activeCellIndex = index;
                          jupyterapp.commands.execute('notebook:run-cell'); }""",
            index,
        )

    def run_cell(self, index: int) -> None:
        self.start_cell(index)
        self.page.wait_for_function(
            """index => {
                const widget = jupyterapp.shell.currentWidget;
                return widget.content.model.cells.get(index).executionCount
                    && widget.sessionContext.session.kernel.status !== 'busy';
            }""",
            arg=index,
            polling=100,  # milliseconds
            timeout=FREEZE_S * 1000,
        )
        kinds = [output["output_type"] for output in self.cell(index)["outputs"]]
        assert "error" not in kinds, self.text(index)

    def cell(self, index: int) -> dict:
        model = "index => jupyterapp.shell.currentWidget.content.model.cells.get(index).toJSON()"
        return self.page.evaluate(model, index)

    def text(self, index: int) -> str:
        """All the text that a cell has put out."""
        said = []
        for output in self.cell(index)["outputs"]:
            said += [output.get("text", ""), output.get("evalue", ""), output.get("ename", "")]
        return "\n".join("".join(text) for text in said)

    def is_busy(self) -> bool:
        status = "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.status"
        return self.page.evaluate(status) == "busy"

    def ask_kernel(self, code: str) -> str:
        """What `code` prints in the kernel."""
        return self.page.evaluate(
            """async code => {
                const kernel = jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                const future = kernel.requestExecute({code, store_history: false, silent: false});
                let printed = '';
                future.onIOPub = message => {
                    if (message.header.msg_type === 'stream') printed += message.content.text;
                    if (message.header.msg_type === 'error') printed += message.content.evalue;
                };
                await future.done;
                return printed;
            }""",
            code,
        )

    def save(self) -> None:
        self.page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")

    def close(self) -> None:
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()

    def press(self, command: str) -> None:
        """Click the toolbar button of a command."""
        self.page.locator(f'.jp-Toolbar [data-command="{command}"]:visible').first.click()

    def kernel(self) -> psutil.Process:
        return psutil.Process(int(self.ask_kernel("import os; print(os.getpid())")))


@pytest.fixture(scope="module")
def notebook(browser, lab):
    """With a cell that imports, one for each widget, and those of the stop button."""
    sources = [*cells_of_the_notebooks(), *HUNG, STAY, ANSWER, CHART, ASKED]
    write_notebook(lab[2] / "test.ipynb", *sources)
    notebook = Notebook(browser, lab, "test.ipynb")
    dirty = "() => jupyterapp.shell.currentWidget.context.model.dirty"
    assert not notebook.page.evaluate(dirty)  # as soon as it is opened
    notebook.run_cell(0)
    yield notebook
    notebook.close()


# Every kind of widget answers the keyboard.

KEYS = {  # by kind of widget: what takes the key, and which key
    "slider": (".widget-slider [role=slider]", "ArrowRight"),
    "player": (".widget-play button:first-child", "Space"),
    "toggle": (".widget-toggle-button:not(.mod-active)", "Space"),
}
AT_THE_END = "widget => widget.ariaValueMax !== null && widget.ariaValueNow === widget.ariaValueMax"
VISIBLE = "all => all.filter(each => each.checkVisibility()).map(each => each.outerHTML)"
VALUES = """
import json
from ipywidgets import HTML, Image
from ipywidgets.widgets.widget import _instances
inputs = {k: widget for k, widget in _instances.items() if not isinstance(widget, HTML | Image)}
print(json.dumps({k: str(getattr(widget, "value", None)) for k, widget in inputs.items()}))
"""


@pytest.mark.parametrize("kind", KEYS)
def test_every_kind_of_widget_answers_the_keyboard(notebook, kind):
    """The caption, the picture where there is one, and the value that Python has must change."""
    selector, key = KEYS[kind]
    for index in range(1, len(WIDGETS) + 1):
        if not notebook.cell(index)["execution_count"]:
            notebook.run_cell(index)
    areas = notebook.page.locator(f".jp-OutputArea-output:has({selector})")
    wait_until(lambda: areas.count() >= (len(WIDGETS) if kind == "slider" else 1))
    for number in range(areas.count()):
        area = areas.nth(number)
        widget = area.locator(selector).first

        def look(area=area) -> tuple:
            captions = area.locator(".widget-html-content").all_inner_texts()
            pictures = area.locator("svg[role=img]").evaluate_all(VISIBLE)
            return captions, pictures or secrets.token_hex(), notebook.ask_kernel(VALUES)

        before = look()
        widget.focus()
        widget.press("ArrowLeft" if widget.evaluate(AT_THE_END) else key)
        wait_until(
            lambda: all(a != b for a, b in zip(before, look(), strict=True)),  # noqa: B023
            every_s=0.1,
        )
        if kind == "player":
            widget.press("Space")
    assert not DEAD.search(notebook.page.locator(".jp-Notebook").inner_text())


# Any window


TOO_WIDE = """() => [...document.querySelectorAll('.jp-OutputArea-output')]
    .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.innerHTML)"""
NAMELESS = """() => [...document.querySelectorAll('.jp-OutputArea-output :is(' +
    'button, input, img, [role=slider], svg[role=img])')].filter(each => each.checkVisibility() &&
    !each.alt && !each.title && !each.ariaLabel && !each.innerText && !each.labels?.length)
    .map(each => each.outerHTML.slice(0, 300))"""


def test_no_output_is_wider_than_its_box(notebook):
    """In a whole screen, half of one, and on a phone. Every picture is there."""
    for live in (5, 6):  # the chart and the prediction
        notebook.run_cell(len(WIDGETS) + live)
    old = notebook.page.viewport_size
    notebook.page.evaluate("() => jupyterapp.shell.collapseLeft()")  # the file browser
    for width in (1280, 720, 390):
        notebook.page.set_viewport_size({"width": width, "height": 900})
        wait_until(lambda: notebook.page.evaluate(TOO_WIDE) == [], every_s=0.1)
    notebook.page.set_viewport_size(old)
    prose = "getComputedStyle(document.querySelector('.jp-RenderedMarkdown p')).maxWidth"
    assert notebook.page.evaluate(prose) != "none"


def test_a_new_kernel_says_nothing_on_the_terminal(notebook, lab):
    log = (lab[2].parent / "log").read_text()
    assert "Kernel started" in log
    assert "encryption" not in log


def test_every_control_and_picture_has_a_name(notebook):
    wait_until(lambda: notebook.page.evaluate(NAMELESS) == [], every_s=0.1)


DEAD = re.compile("model not found|Error displaying widget|Loading widget")
DRAWN = ".jp-OutputArea-output:is(.jupyter-widgets, :has(.jupyter-widgets))"  # or said to be dead
OPENINGS = 5  # of 25, 4 were in vain with both cores busy


# The stop button, and a new kernel: a player needs neither.


STEP = """async player => {
    const pictures = () => [...player.querySelectorAll('svg[role=img]')];
    const shown = () => pictures().find(each => each.checkVisibility());
    const at = player.querySelector('input[type=number]'), before = shown();
    const way = at.value === at.max ? 'back' : 'on', begun = performance.now();
    player.querySelector(`[aria-label="one step ${way}"]`).click();
    while (shown() === before && performance.now() < begun + 5000)
        await new Promise(resolve => setTimeout(resolve, 5));
    return performance.now() - begun;
}"""


def step_on(notebook) -> None:
    """Press an arrow of the first player; its picture must change at once, once in three times."""
    player = notebook.page.locator(".jp-OutputArea-output:has(.widget-play)").first
    assert min(player.evaluate(STEP) for _ in range(3)) < 300  # milliseconds


def ranks_of(kernel: psutil.Process, at_least: int) -> list[psutil.Process]:
    """The descendants of a kernel once there are so many: fork server and ranks."""
    wait_until(lambda: len(kernel.children(recursive=True)) >= at_least)
    return kernel.children(recursive=True)


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_stop_button_ends_a_hung_cell_and_a_restart_leaves_no_rank(notebook):
    wait, _, stay, answer = range(len(WIDGETS) + 1, len(WIDGETS) + 5)
    kernel = notebook.kernel()
    for hung in (wait, wait + 1):
        notebook.start_cell(hung)
        ranks_of(kernel, 3)  # two ranks, and the server that they are forked from
        time.sleep(0.5)
        assert notebook.is_busy(), notebook.text(hung)
        step_on(notebook)
        notebook.press("notebook:interrupt-kernel")
        wait_until(lambda: "KeyboardInterrupt" in notebook.text(hung), every_s=0.1)  # noqa: B023
    notebook.run_cell(answer)
    assert notebook.text(answer).strip() == "42"
    notebook.save()

    notebook.run_cell(stay)  # four ranks that stay, beside a launch that hangs
    notebook.start_cell(wait)
    ranks = ranks_of(kernel, 1 + 4 + 2)
    notebook.press("notebook:restart-kernel")
    notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
    wait_until(lambda: not kernel.is_running() and all(map(is_gone, ranks)))
    step_on(notebook)
    notebook.start_cell(answer)
    wait_until(lambda: notebook.text(answer).strip() == "42", every_s=0.1)


def widgets_in(path: Path) -> set[str]:
    """The ids of the widgets whose state a notebook has."""
    state = json.loads(path.read_text())["metadata"]["widgets"].values()
    return {widget for of_version in state for widget in of_version["state"]}


def test_a_saved_notebook_shows_its_widgets_again(notebook, lab):
    """Its kernel was restarted; under another name it has one that knows nothing of them."""
    path = lab[2] / "test.ipynb"
    before = widgets_in(path)  # as saved before the restart
    assert before
    # JupyterLab reads them back after a restart, one after the other.
    wait_until(lambda: notebook.save() or widgets_in(path) >= before, every_s=0.2)
    shutil.copy(path, lab[2] / "again.ipynb")
    text = (lab[2] / "again.ipynb").read_text()
    shown = re.findall(r'"model_id": "(\w+)"', text)
    assert len(shown) == len(WIDGETS) + 1  # and the prediction
    assert set(shown) <= jupyter_server_config.saved_widgets(json.loads(text)).keys()
    # ipywidgets 8.1 reads widgets from the kernel twice, and now and then takes the file for read
    # as soon as the second reading is done. Then it says for good that it has no such model, and a
    # reader opens the notebook again.
    for _ in range(OPENINGS):
        notebook.change_to("again.ipynb")
        wait_until(lambda: notebook.page.locator(DRAWN).count() == len(shown), every_s=0.1)
        if not DEAD.search(notebook.page.locator(".jp-Notebook").inner_text()):
            break
    else:
        pytest.fail(f"dead in each of {OPENINGS} openings")
    step_on(notebook)
    # What needs the kernel says so, and has nothing to move.
    asks = notebook.page.locator(".ddpkit-asks")
    assert asks.count() >= 3
    for number in range(asks.count()):
        assert "Run its cell" in asks.nth(number).locator(".ddpkit-still").inner_text()
        assert not asks.nth(number).locator(".ddpkit-controls").is_visible()
    notebook.save()  # and from here again
    text = (lab[2] / "again.ipynb").read_text()
    views = re.findall(r'"model_id": "(\w+)"', text)
    assert len(views) == len(WIDGETS) + 1  # and the prediction
    assert set(views) <= jupyter_server_config.saved_widgets(json.loads(text)).keys()
