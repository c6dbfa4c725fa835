"""What endless printing leaves in the notebook's file, in a real kernel."""

import asyncio
import threading
import time

import nbformat
from nbclient import NotebookClient
from outside import wait_until

CHATTER = """\
import torch.distributed as dist
from pathlib import Path
from ddpkit import launch

def chatter():
    rank, number = dist.get_rank(), 0
    Path(f"printing {rank}").touch()
    while True:
        print(number if rank < 2 else "x" * 1000)
        number += 1

launch(chatter, world_size=4, live=True)
"""


def test_endless_printing_that_was_stopped_leaves_a_small_notebook(tmp_path):
    cell = nbformat.v4.new_code_cell(CHATTER)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, kernel_name="python3", resources=resources, timeout=120)
    client.allow_errors = True

    def press_stop():
        wait_until(lambda: len(list(tmp_path.glob("printing*"))) == 4)
        time.sleep(1.0)  # megabytes, if nothing keeps them
        asyncio.run(client.km.interrupt_kernel())

    stop = threading.Thread(target=press_stop)
    stop.start()
    client.execute()
    stop.join()
    file = tmp_path / "stopped.ipynb"
    nbformat.write(notebook, file)
    assert file.stat().st_size < 1_000_000
    assert [output.get("ename") for output in cell.outputs][-1] == "KeyboardInterrupt"
    shown = "".join(output.get("text", "") for output in cell.outputs)
    for rank, line in enumerate(["0", "0", "x" * 1000, "x" * 1000]):
        assert f"rank {rank} | {line}\n" in shown
        assert f"rank {rank} | ... it goes on, but no more of it is shown ...\n" in shown
