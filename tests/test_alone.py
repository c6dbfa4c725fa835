"""Subjects need torch.distributed alone: tests of theirs in a world that knows nothing of ours."""

import test_batch_norm
import test_fast_buckets
import test_parameter_server
import test_ring
import test_shared_memory
import test_training
import torch.distributed as dist
from on_ranks import call_on_rank, into_torchs_own_world, on_ranks

# They look at no records of ours.
TESTS = [
    test_training.test_no_sync_ends_however_it_ends,
    test_fast_buckets.test_bf16_on_the_way,
    test_ring.test_dtypes_shapes_and_segments,
    test_shared_memory.test_several_buffers,
    test_batch_norm.test_ranks_together_are_one_process,
    test_parameter_server.test_staleness_is_what_others_did_meanwhile,
]


@on_ranks(2)
def test_in_a_world_of_torchs_own(check, tmp_path):
    into_torchs_own_world(tmp_path)
    check.unless(not hasattr(dist.group.WORLD, "recorder"), "it is our world")
    for test in TESTS:
        call_on_rank(test.__wrapped__, check, {})
