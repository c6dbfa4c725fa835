"""The notebooks in a real JupyterLab in a real browser: run, driven from the keyboard, stopped, restarted."""

import json
import os
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
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
if hasattr(os, "getuid") and os.getuid() == 0:
    FLAGS.append("--no-sandbox")

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of these browsers is installed: {', '.join(BROWSERS)}")

HANGS = {
    "a sleeping launch": "launch(time.sleep, 1e6, world_size=2)",
    "a launch waiting for a message": (
        "def wait():\n"
        "    if dist.get_rank() == 0:\n"
        "        dist.recv(torch.zeros(1), src=1)\n"
        "    time.sleep(1e6)\n"
        "launch(wait, world_size=2, hang_after=1e6)"
    ),
    "a sleeping ranks cell": "%%ranks 2\nimport time\ntime.sleep(1e6)",
}
SET_UP = "%load_ext ddpkit\nimport time\nimport torch\nimport torch.distributed as dist\nfrom ddpkit import launch"


def write_notebook(path: Path, *sources: str) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.write(notebook, path)


def wait_until(true: Callable[[], object], seconds: float, what: str) -> object:
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """(address, token, folder) of a JupyterLab with the notebooks, their outputs removed, and nobody's settings."""
    home = tmp_path_factory.mktemp("jupyter")
    folder = home / "notebooks"
    folder.mkdir()
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":  # whatever is shown then was put out here
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, folder / path.name)
    settings = {
        # Otherwise cells outside the window are not in the page.
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
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
    options = ["--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root", "--LabApp.expose_app_in_browser=True"]
    log = home / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], cwd=folder, env=environment, stdout=file, stderr=file
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
        self.page.goto(f"{address}lab/workspaces/{secrets.token_hex(4)}/tree/{name}?token={token}")
        self.page.wait_for_function(
            """() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'
                     && window.jupyterapp.shell.currentWidget.content.model.cells.length > 0""",
            timeout=60_000,
        )

    def run_all(self) -> None:
        """Waits for the last cell; the command itself waits only for the first that raises, meant or not."""
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:run-all-cells'); }")
        last = max(index for index, cell in enumerate(self.cells()) if cell["cell_type"] == "code")
        wait_until(lambda: self.cells()[last]["execution_count"] and not self.is_busy(), 120, "the last cell ran")

    def start_cell(self, index: int) -> None:
        """As a click into the cell and Shift-Enter; doesn't wait for it."""
        self.page.evaluate(
            """index => { jupyterapp.shell.currentWidget.content.activeCellIndex = index;
                          jupyterapp.commands.execute('notebook:run-cell'); }""",
            index,
        )

    def run_cell(self, index: int) -> None:
        self.start_cell(index)
        wait_until(lambda: self.cells()[index]["execution_count"] and not self.is_busy(), 30, f"cell {index} ran")
        assert not any(output["output_type"] == "error" for output in self.cells()[index]["outputs"]), self.text(index)

    def cells(self) -> list[dict]:
        return self.page.evaluate("() => jupyterapp.shell.currentWidget.content.model.toJSON().cells")

    def text(self, index: int) -> str:
        """All the text that a cell has put out."""
        outputs = self.cells()[index]["outputs"]
        parts = [[each.get("text", ""), each.get("evalue", ""), each.get("ename", "")] for each in outputs]
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
        if sources:
            write_notebook(lab[2] / name, *sources)
        opened.append(Notebook(browser, lab, name))
        return opened[-1]

    yield open_notebook
    for notebook in opened:
        notebook.close()


# Every widget of a notebook answers the keyboard.

KEYS = {  # by kind of widget: what takes the key, and which key
    "slider": (".widget-slider [role=slider]", "ArrowRight"),
    "player": (".widget-play button:first-child", "Space"),
    "toggle": (".widget-toggle-button", "Space"),
}
VALUES = """
import json
from ipywidgets import HTML, Image
from ipywidgets.widgets.widget import _instances
inputs = {key: widget for key, widget in _instances.items() if not isinstance(widget, HTML | Image)}
print(json.dumps({key: str(getattr(widget, "value", None)) for key, widget in inputs.items()}))
"""


def expect_change(look: Callable[[], object], before: object, what: str) -> None:
    wait_until(lambda: look() != before, 5, f"{what} changed from {str(before)[:200]}")


def drive(notebook: Notebook, kind: str) -> int:
    """Press a key on every widget of this kind: the caption, the picture where there is one, and the value that
    Python has must change. Returns how many there are."""
    selector, key = KEYS[kind]
    found = notebook.page.locator(f".jp-OutputArea-output {selector}")
    for number in range(found.count()):
        widget = found.nth(number)
        area = widget.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')][1]")
        looks = {
            "caption": area.locator(".widget-html-content").all_inner_texts,
            "picture": lambda area=area: area.locator("img").evaluate_all("all => all.map(image => image.src)"),
            "value in Python": lambda: notebook.ask_kernel(VALUES),
        }
        before = {what: look() for what, look in looks.items()}
        widget.focus()
        widget.press("ArrowLeft" if widget.evaluate(AT_THE_END) else key)
        for what, look in looks.items():
            if before[what] or what != "picture":
                expect_change(look, before[what], f"{kind} {number}: {what}")
        if kind == "player":
            widget.press("Space")
    return found.count()


AT_THE_END = "widget => widget.ariaValueMax !== null && widget.ariaValueNow === widget.ariaValueMax"


@pytest.mark.parametrize("name", [path.name for path in NOTEBOOKS])
def test_a_notebook_runs_and_its_widgets_answer_the_keyboard(open_notebook, name):
    notebook = open_notebook(name)
    notebook.run_all()
    cells = [cell for cell in notebook.cells() if cell["cell_type"] == "code"]
    assert cells
    for cell in cells:
        errors = [output["evalue"] for output in cell["outputs"] if output["output_type"] == "error"]
        assert bool(errors) == ("raises-exception" in cell["metadata"].get("tags", [])), (cell["source"], errors)
        assert cell["execution_count"], f"not run: {cell['source']}"
    assert sum(drive(notebook, kind) for kind in KEYS), "a notebook without a widget"


PLAYER = """
import ipywidgets
from IPython.display import display
from matplotlib.figure import Figure
import io
def frame(step):
    figure, file = Figure(figsize=(1, 1)), io.BytesIO()
    figure.subplots().plot([0, step])
    figure.savefig(file, format="png")
    return file.getvalue()
play, slider = ipywidgets.Play(max=3, interval=300), ipywidgets.IntSlider(value=3, max=3, continuous_update=False)
ipywidgets.jslink((play, "value"), (slider, "value"))
picture, caption = ipywidgets.Image(value=frame(3)), ipywidgets.HTML("at 3")
def show(change):
    picture.value, caption.value = frame(change.new), f"at {change.new}"
slider.observe(show, "value")
display(ipywidgets.VBox([play, slider, picture, caption]))
"""


def test_driving_works_and_notices_a_widget_that_does_not_answer(open_notebook):
    dead = 'display(ipywidgets.VBox([ipywidgets.IntSlider(), ipywidgets.HTML("dead")]))'
    notebook = open_notebook("driving.ipynb", PLAYER.strip(), dead)
    notebook.start_cell(0)
    notebook.page.wait_for_selector(".widget-slider [role=slider]")
    assert drive(notebook, "slider") == 1
    assert drive(notebook, "player") == 1
    notebook.start_cell(1)
    wait_until(lambda: notebook.page.locator(".widget-slider").count() == 2, 10, "the second slider")
    with pytest.raises(AssertionError, match="slider 1: caption"):
        drive(notebook, "slider")


# The stop button, and a new kernel.


def ranks_of(kernel: psutil.Process, at_least: int) -> list[psutil.Process]:
    """The descendants of a kernel once there are so many: fork server and ranks."""
    return wait_until(
        lambda: (found := kernel.children(recursive=True)) and len(found) >= at_least and found, 20, "ranks started"
    )


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("hang", HANGS)
def test_the_stop_button_ends_a_hung_cell(open_notebook, hang):
    notebook = open_notebook("stop.ipynb", SET_UP, HANGS[hang], "print(6 * 7)")
    notebook.run_cell(0)
    kernel = notebook.kernel()
    notebook.start_cell(1)
    ranks_of(kernel, 3)
    time.sleep(1)
    assert notebook.is_busy(), notebook.text(1)
    notebook.press("notebook:interrupt-kernel")
    wait_until(lambda: not notebook.is_busy(), 5, "the cell ended")
    assert "KeyboardInterrupt" in notebook.text(1)
    notebook.start_cell(2)
    wait_until(lambda: notebook.text(2).strip() == "42", 5, "the next cell ran")


@pytest.mark.parametrize(
    ("cell", "processes"),  # the ranks, and the server that they are forked from
    [("%%ranks 4\nx = rank", 5), (HANGS["a sleeping launch"], 3), (HANGS["a sleeping ranks cell"], 3)],
    ids=["ranks that stay", "a hung launch", "a hung ranks cell"],
)
def test_a_restarted_kernel_leaves_no_rank(open_notebook, cell, processes):
    notebook = open_notebook("restart.ipynb", SET_UP, cell, "print(6 * 7)")
    notebook.run_cell(0)
    kernel = notebook.kernel()
    notebook.start_cell(1)
    ranks = ranks_of(kernel, processes)
    notebook.press("notebook:restart-kernel")
    notebook.page.locator(".jp-Dialog .jp-mod-accept").click()
    wait_until(lambda: not kernel.is_running(), 15, "the old kernel is gone")
    wait_until(lambda: all(map(is_gone, ranks)), 5, f"these are gone: {ranks}")
    notebook.start_cell(2)
    wait_until(lambda: notebook.text(2).strip() == "42", 15, "the new kernel answers")
