"""Subjects need torch.distributed alone: tests of theirs under torchrun, in a world of its own."""

import sys
from pathlib import Path

from outside import run_script

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TESTS = [
    "test_training.test_no_sync_ends_however_it_ends",
    "test_fast_buckets.test_bf16_on_the_way",
    "test_ring.test_dtypes_shapes_and_segments",
    "test_shared_memory.test_several_buffers",
    "test_batch_norm.test_ranks_together_are_one_process",
    "test_parameter_server.test_synchronous_is_one_process",
    "test_parameter_server.test_staleness_is_what_others_did_meanwhile",
]

SCRIPT = """
import importlib
import sys

import torch.distributed as dist

sys.path.append(sys.argv[1])
import twin

dist.init_process_group("gloo")
check = twin.Complaints()
for test in sys.argv[2:]:
    module, name = test.split(".")
    getattr(importlib.import_module(module), name).__wrapped__(check)
with open(f"rank.{dist.get_rank()}", "w") as file:
    print(*check, file=file)
dist.destroy_process_group()
"""


def test_under_torchrun_alone(tmp_path):
    """These tests look at no records of ours."""
    folder = str(Path(__file__).parent)
    run_script(tmp_path, SCRIPT, folder, *TESTS, command=TORCHRUN, OMP_NUM_THREADS="1")
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)] == ["\n"] * 2
