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
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest

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
    "09_flash_attention": "flash_player(",
}
IMPORT = r"(import|from) [^()]*$"
SET_UP = """\
%load_ext ddpkit
import time
import torch
import torch.distributed as dist
from ddpkit import launch"""
WAIT = """\
def wait():
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    time.sleep(1e6)
launch(wait, world_size=2, hang_after=1e6)"""
SLEEP = "launch(time.sleep, 1e6, world_size=2)"
SLEEP_IN_RANKS = "%%ranks 2\nimport time\ntime.sleep(1e6)"


def widget_cells() -> list[str]:
    """A cell that imports, and cells that show a widget each, as the notebooks have them."""
    imports, shown = set(), []
    for name, call in WIDGETS.items():
        notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
        sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        lines = "\n".join(sources).splitlines()
        imports |= {line for line in lines if re.match(IMPORT, line)}
        shown.append(next(source for source in sources if call in source))
    return ["\n".join(sorted(imports)), *shown]


def write_notebook(path: Path, *sources: str) -> None:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["kernelspec"] = kernel
    nbformat.write(notebook, path)


def wait_until(true: Callable[[], object], seconds: float, what: str) -> object:
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """(address, token, folder) of a JupyterLab with nobody's settings."""
    home = tmp_path_factory.mktemp("jupyter")
    folder = home / "notebooks"
    folder.mkdir()
    settings = {
        # Otherwise cells outside the window are not in the page.
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {
            "fetchNews": "false",
            "checkForUpdates": False,
            "doNotDisturbMode": True,
        },
    }
    for name, values in settings.items():
        file = home / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    token = secrets.token_hex(16)
    environment = os.environ | {
        "JUPYTER_TOKEN": token,
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    environment.pop("PYTEST_CURRENT_TEST", None)  # the kernel would behave differently
    options = [
        "--no-browser",
        "--ip=127.0.0.1",
        "--port=0",
        "--allow-root",
        "--LabApp.expose_app_in_browser=True",
    ]
    log = home / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=file,
        )

    def find_address() -> str:
        assert server.poll() is None, log.read_text()
        texts = [file.read_text() for file in (home / "runtime").glob("jpserver-*.json")]
        return json.loads(texts[0])["url"] if texts and texts[0].endswith("}") else ""

    try:
        address = wait_until(find_address, 60, "JupyterLab started")
        yield address, token, folder
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
        self.page.wait_for_function(
            """() => {
                const widget = window.jupyterapp?.shell.currentWidget;
                return widget?.sessionContext?.session?.kernel?.status === 'idle'
                    && widget.content.model.cells.length > 0;
            }""",
            timeout=60_000,
        )

    def start_cell(self, index: int) -> None:
        """As a click into the cell and Shift-Enter; doesn't wait for it."""
        self.page.evaluate(
            """index => { jupyterapp.shell.currentWidget.content.activeCellIndex = index;
                          jupyterapp.commands.execute('notebook:run-cell'); }""",
            index,
        )

    def run_cell(self, index: int) -> None:
        self.start_cell(index)
        wait_until(
            lambda: self.cells()[index]["execution_count"] and not self.is_busy(),
            60,
            f"cell {index} ran",
        )
        kinds = [output["output_type"] for output in self.cells()[index]["outputs"]]
        assert "error" not in kinds, self.text(index)

    def cells(self) -> list[dict]:
        return self.page.evaluate(
            "() => jupyterapp.shell.currentWidget.content.model.toJSON().cells"
        )

    def text(self, index: int) -> str:
        """All the text that a cell has put out."""
        outputs = self.cells()[index]["outputs"]
        parts = [
            [each.get("text", ""), each.get("evalue", ""), each.get("ename", "")]
            for each in outputs
        ]
        parts += [[each.get("data", {}).get("text/plain", "")] for each in outputs]
        return "\n".join("".join(text) for part in parts for text in part)

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

    def press(self, command: str) -> None:
        """Click the toolbar button of a command."""
        self.page.locator(f'.jp-Toolbar [data-command="{command}"]:visible').first.click()

    def kernel(self) -> psutil.Process:
        return psutil.Process(int(self.ask_kernel("import os; print(os.getpid())")))

    def close(self) -> None:
        self.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()


@pytest.fixture
def open_notebook(browser, lab):
    opened = []

    def open_notebook(name: str, *sources: str) -> Notebook:
        write_notebook(lab[2] / name, *sources)
        opened.append(Notebook(browser, lab, name))
        return opened[-1]

    yield open_notebook
    for notebook in opened:
        notebook.close()


# Every kind of widget answers the keyboard.

KEYS = {  # by kind of widget: what takes the key, and which key
    "slider": (".widget-slider [role=slider]", "ArrowRight"),
    "player": (".widget-play button:first-child", "Space"),
    "toggle": (".widget-toggle-button", "Space"),
}
AT_THE_END = "widget => widget.ariaValueMax !== null && widget.ariaValueNow === widget.ariaValueMax"
VALUES = """
import json
from ipywidgets import HTML, Image
from ipywidgets.widgets.widget import _instances
inputs = {k: widget for k, widget in _instances.items() if not isinstance(widget, HTML | Image)}
print(json.dumps({k: str(getattr(widget, "value", None)) for k, widget in inputs.items()}))
"""


def drive(notebook: Notebook, kind: str, first: int = 0, patience_s: float = 20) -> int:
    """Press a key on every widget of this kind, from the `first` on; returns how many there are.

    The caption, the picture where there is one, and the value that Python has must change.
    """
    selector, key = KEYS[kind]
    found = notebook.page.locator(f".jp-OutputArea-output {selector}")
    for number in range(first, found.count()):
        widget = found.nth(number)
        area = widget.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')][1]")
        pictures = area.locator("img")
        looks = {
            "caption": area.locator(".widget-html-content").all_inner_texts,
            "picture": lambda: pictures.evaluate_all("all => all.map(image => image.src)"),  # noqa: B023
            "value in Python": lambda: notebook.ask_kernel(VALUES),
        }
        before = {what: look() for what, look in looks.items()}
        widget.focus()
        widget.press("ArrowLeft" if widget.evaluate(AT_THE_END) else key)
        for what, look in looks.items():
            if before[what] or what != "picture":
                changed = lambda look=look, was=before[what]: look() != was  # noqa: E731
                wait_until(changed, patience_s, f"{kind} {number}: {what} changed")
        if kind == "player":
            widget.press("Space")
    return found.count()


def test_every_kind_of_widget_answers_the_keyboard(open_notebook):
    cells = widget_cells()
    dead = "import ipywidgets\nipywidgets.VBox([ipywidgets.IntSlider(), ipywidgets.HTML('dead')])"
    notebook = open_notebook("widgets.ipynb", *cells, dead)
    for index in range(len(cells)):
        notebook.run_cell(index)
    wait_until(lambda: notebook.page.locator(".widget-slider").count(), 20, "a widget is shown")
    driven = {kind: drive(notebook, kind) for kind in KEYS}
    assert min(driven.values()) > 0, driven
    assert driven["slider"] >= len(WIDGETS), driven
    page = notebook.page.locator(".jp-Notebook").inner_text()
    assert not re.search("model not found|Error displaying widget|Loading widget", page)

    notebook.run_cell(len(cells))  # and the test notices a widget that doesn't answer
    count = driven["slider"] + 1
    sliders = notebook.page.locator(KEYS["slider"][0])
    wait_until(lambda: sliders.count() == count, 20, "the dead slider is shown")
    with pytest.raises(AssertionError, match="caption changed"):
        drive(notebook, "slider", first=count - 1, patience_s=1)


# The stop button, and a new kernel.


def ranks_of(kernel: psutil.Process, at_least: int) -> list[psutil.Process]:
    """The descendants of a kernel once there are so many: fork server and ranks."""

    def found() -> list[psutil.Process]:
        there = kernel.children(recursive=True)
        return there if len(there) >= at_least else []

    return wait_until(found, 60, "ranks started")


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_stop_button_ends_a_hung_cell_and_a_restart_leaves_no_rank(open_notebook):
    stay, answer = "%%ranks 4\nx = rank", "print(6 * 7)"
    notebook = open_notebook("stop.ipynb", SET_UP, SLEEP, WAIT, SLEEP_IN_RANKS, stay, answer)
    notebook.run_cell(0)
    kernel = notebook.kernel()
    for hung in (1, 2, 3):
        notebook.start_cell(hung)
        ranks_of(kernel, 3)  # two ranks, and the server that they are forked from
        time.sleep(0.5)
        assert notebook.is_busy(), notebook.text(hung)
        notebook.press("notebook:interrupt-kernel")
        wait_until(lambda: not notebook.is_busy(), 20, "the cell ended")
        assert "KeyboardInterrupt" in notebook.text(hung)
    notebook.run_cell(5)
    assert notebook.text(5).strip() == "42"

    notebook.run_cell(4)  # four ranks that stay, beside a launch that hangs
    notebook.start_cell(1)
    ranks = ranks_of(kernel, 1 + 4 + 2)
    notebook.press("notebook:restart-kernel")
    notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
    wait_until(lambda: not kernel.is_running(), 30, "the old kernel is gone")
    wait_until(lambda: all(map(is_gone, ranks)), 20, f"these are gone: {ranks}")
    notebook.start_cell(5)
    wait_until(lambda: notebook.text(5).strip() == "42", 30, "the new kernel answers")
