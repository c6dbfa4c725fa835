"""JupyterLab's settings for the course; `make lab` puts this file where Jupyter finds it.

`custom.css`, in the folder `custom` beside it, makes prose narrow and pictures fit; a reader's own
custom.css comes first.

The hook for saving a notebook is there because ipywidgets saves only the widgets whose kernel
lives: a notebook that is saved after a restart, or after it was only opened, would show "model not
found" in their place. So the widgets that the file already has are kept; one that it doesn't have
gives way to the picture and the text beside it.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"


def saved_widgets(notebook: dict) -> dict:
    """{id: the widget as the notebook has it}."""
    return notebook["metadata"].get("widgets", {}).get(STATE, {}).get("state", {})


def connected(shown: list[str], widgets: dict) -> dict:
    """Select from `widgets` those that are shown, or that belong to one that is."""
    near = defaultdict(set)
    for each, widget in widgets.items():
        for other in re.findall(r"IPY_MODEL_(\w+)", json.dumps(widget)):
            near[each].add(other)
            near[other].add(each)  # a link between two names both, and neither names it
    found, look_at = {}, list(shown)
    while look_at:
        each = look_at.pop()
        if each in widgets and each not in found:
            found[each] = widgets[each]
            look_at += near[each]
    return found


def keep_widgets(model, path, contents_manager, **_) -> None:
    """Keep the file's widgets, before a notebook is saved over it."""
    if model["type"] != "notebook":
        return
    notebook, file = model["content"], Path(contents_manager.root_dir, path)
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"metadata": {}}
    widgets = saved_widgets(before) | saved_widgets(notebook)
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    shown = [output["data"] for output in outputs if VIEW in output.get("data", {})]
    kept = connected([data[VIEW]["model_id"] for data in shown], widgets)
    for data in shown:
        if data[VIEW]["model_id"] not in kept:
            del data[VIEW]
    states = {STATE: {"version_major": 2, "version_minor": 0, "state": kept}}
    notebook["metadata"].pop("widgets", None)
    notebook["metadata"] |= {"widgets": states} if kept else {}


if "get_config" in globals():  # Jupyter reads this file
    from jupyter_core.paths import jupyter_config_dir

    settings = get_config()  # noqa: F821
    settings.ContentsManager.pre_save_hook = keep_widgets
    settings.LabApp.custom_css = True
    own, ours = Path(jupyter_config_dir(), "custom"), Path(__file__).with_name("custom")
    settings.ServerApp.tornado_settings = {"static_custom_path": [str(own), str(ours)]}
