"""Two machines, a wire between them: a rank is killed, the wire is pulled, and training goes on."""

import contextlib
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
from outside import FREEZE_S, ip, two_machines, wait_until

from ddpkit.inspect.explain import main as explain

TRAIN = """\
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddpkit.ddp import BucketedDDP

folder, how = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = BucketedDDP(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = 0
if (folder / "last.pt").exists():
    saved = torch.load(folder / "last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"] + 1
for step in range(first, 6):
    data = torch.randn(12, 12, generator=torch.Generator().manual_seed(step))
    inputs, targets = data.chunk(world_size)[rank].split([8, 4], dim=1)
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    model.synchronize()
    optimizer.step()
    dist.all_reduce(loss)
    if rank == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(saved, folder / "draft.pt")
        (folder / "draft.pt").rename(folder / "last.pt")
        with open(folder / "losses", "a") as file:
            print(step, loss.item(), file=file)
    dist.barrier()
    happened = folder / f"happened.{rank}"
    if step == 3 and how != "nothing" and not happened.exists():
        happened.write_text(str(time.time()))
        if how == "kill" and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "cut":
            time.sleep(2)
dist.destroy_process_group()
"""


@pytest.fixture
def machines():
    with two_machines() as found:
        yield found


class Job:
    """`torchrun` on both machines; they share a folder, as machines of a cluster do."""

    def __init__(self, folder, machines, how: str, *module: str):
        self.folder, self.agents = folder, []
        (folder / "train.py").write_text(TRAIN)
        for place, (namespace, interface) in enumerate(machines):
            command = ["ip", "netns", "exec", namespace, sys.executable, "-m"]
            command += ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            command += ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29500", "--rdzv-id=job"]
            # The name of this machine leads to neither address, so torchrun can't tell its host.
            command += [f"--rdzv-conf=is_host={int(place == 0)}", "--max-restarts=3"]
            command += [f"--local-addr=10.77.0.{place + 1}"]
            command += [*module, str(folder / "train.py"), str(folder), how]
            own = {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            own |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TMPDIR": str(folder)}
            with open(folder / f"machine_{place}.log", "w") as log:
                options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
                agent = subprocess.Popen(command, env=os.environ | own, **options)
            self.agents.append(agent)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for agent in self.agents:
            family = [psutil.Process(agent.pid)] if agent.poll() is None else []
            for process in family:
                for child in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.Error):
                        child.kill()
            agent.wait()

    def wait(self) -> None:
        for agent in self.agents:
            assert agent.wait(FREEZE_S) == 0, self.log()

    def log(self) -> str:
        logs = [(self.folder / f"machine_{place}.log").read_text() for place in (0, 1)]
        return "\n".join(logs)

    def said(self, pattern: str) -> float | None:
        """The time at which a log is first seen to say this."""
        return time.time() if re.search(pattern, self.log()) else None


def losses(folder) -> list[str]:
    return (folder / "losses").read_text().splitlines()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    with two_machines() as machines, Job(folder, machines, "nothing") as job:
        job.wait()
    return losses(folder)


@pytest.mark.slow
def test_a_killed_rank_is_seen_at_once_and_training_goes_on(
    tmp_path, machines, undisturbed, capsys
):
    with Job(tmp_path, machines, "kill") as job:
        seen = wait_until(lambda: job.said(r"failed \(exitcode: -9\) local_rank: 1"))
        job.wait()
    assert seen - float((tmp_path / "happened.3").read_text()) < 5  # a timeout would take as long
    assert losses(tmp_path) == undisturbed
    assert explain([str(tmp_path / "machine_1.log")]) == 0
    assert capsys.readouterr().out.startswith("rank 1 of this machine was killed by SIGKILL")


@pytest.mark.slow
def test_under_debug_the_killed_rank_is_named(tmp_path, machines, undisturbed):
    with Job(tmp_path, machines, "kill", "-m", "ddpkit.debug") as job:
        job.wait()
    assert "ddpkit: rank 3 was killed by SIGKILL" in job.log()
    assert losses(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_cut_wire_is_named_by_the_timeout_and_training_goes_on(tmp_path, machines, undisturbed):
    namespace, interface = machines[1]
    silence = "nothing is heard of ranks 2 and 3"
    with Job(tmp_path, machines, "cut", "-m", "ddpkit.debug") as job:
        wait_until(lambda: len(list(tmp_path.glob("happened.*"))) == 4)
        ip("-n", namespace, "link", "set", interface, "down")
        cut = time.time()
        named = wait_until(lambda: job.said(silence))
        ip("-n", namespace, "link", "set", interface, "up")
        job.wait()
    # Two seconds of sleep, five of the script's timeout, three in which nothing is heard.
    assert 5 < named - cut < 20
    assert "the wire between the machines is cut" in " ".join(job.log().split())
    assert losses(tmp_path) == undisturbed
