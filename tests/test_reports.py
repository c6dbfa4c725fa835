"""Reports of code that isn't ours, as scripts under torchrun and under `launch`: the same words."""

import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from outside import cell
from test_debug import debug

from ddpkit import LaunchError, launch

BEGIN = """\
rank, world_size = dist.get_rank(), dist.get_world_size()
x = torch.full((4,), float(rank))
dist.barrier()
"""
WAYS = pytest.mark.parametrize("way", ["torchrun", "launch"])


def told(way, folder, text, world_size=2, **options) -> str:
    """The report of a script that must fail, its white space as single blanks."""
    text = textwrap.dedent(text)
    if way == "torchrun":
        keys = [f"--{name.replace('_', '-')}" for name in options]
        return debug(folder, text, *keys, per_machine=world_size, world_size=world_size)[1]
    names = {"__name__": "__main__", "torch": torch, "dist": dist, "time": time}
    script = cell(f"def script():\n{textwrap.indent(BEGIN + text, '    ')}", names)["script"]
    with pytest.raises(LaunchError) as caught:
        launch(script, world_size=world_size, timeout=60, **options)
    return " ".join(str(caught.value).split())


@WAYS
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize(
    "call",
    [
        "dist.reduce_scatter_tensor(x[:2].clone(), x)",
        "dist.all_gather_into_tensor(torch.ones(8), x)",
    ],
)
def test_a_call_that_torch_calls_deprecated_has_the_line_of_the_script(way, call, tmp_path):
    report = told(way, tmp_path, f"if rank == 0:\n    {call}")
    assert report.startswith("deadlock: rank 0 waits in ")
    assert f": {call} " in report
    assert "typing_extensions" not in report
