"""Checks of the reader's answers: `check.broadcast(broadcast)`. Each file has those of a topic."""

from .beat import (
    beat_block,
    beat_lean_step,
    beat_plan,
    beat_schedule,
    beat_server,
    beat_ten_schedules,
)
from .break_it import wait_in_a_circle
from .bucketed_ddp import Bucket, BucketedDDP, FlatDDP, OverlapDDP, no_sync, one_wire, plan_buckets
from .capstone import choose_mesh, learning_rate, logged_loss, mesh_norm, publish, slow_step
from .checker import is_stub
from .chunked_loss import chunked_cross_entropy
from .collectives import (
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from .context_parallel import HeadsForTokens, pairs_of_hop, ring_backward, zigzag
from .data_parallel import HookedDDP, NaiveDDP, average_gradients, push_and_pull, serve, sum_or_mean
from .experts import expert_gradients, move_bias, through_experts, within_capacity
from .few_hops import alpha_beta, halving_doubling_all_reduce
from .flash_attention import flash_backward, flash_forward
from .flash_kernel import flash_kernel
from .fsdp import (
    accumulate_rows,
    backward_calls,
    by_owners,
    clip_all,
    gather_rows,
    shard_in_place,
    sharded_step,
)
from .groups import my_group
from .memory import Checkpoint, Products, alive, block_bytes, checkpoint_sequential
from .mixed_precision import LossScaler, master_step, nearest, predict_bytes, quantise
from .pipeline import gpipe, one_f_one_b, published_1f1b, zero_bubble
from .pipeline_ranks import accumulate, finish_step, run_forwards, run_stage
from .published_rings import published_ring, whole_ring
from .ranks import neighbours, say_hello
from .ring import ring_all_gather, ring_all_reduce, ring_cost, ring_plan, ring_reduce_scatter
from .ring_attention import ring_attention
from .sequence_parallel import GatherTokens, ScatterTokens, sum_of_parts
from .softmax import merge, online_softmax
from .softmax_in_parts import blockwise_softmax, online_weighted_mean, softmax_across_ranks
from .softmax_kernel import softmax_kernel
from .tensor_parallel import (
    CopyToRanks,
    ParallelMLP,
    RowParallelLinear,
    SumOverRanks,
    rows_and_seed,
)
from .tensor_parallel_model import (
    clip_grad_norm,
    split_block,
    sum_copies,
    vocabulary_cross_entropy,
)
from .when_it_is_wrong import exposed, first_wrong, out_of_sight, replicas_apart, token_loss
from .zero import GatherUseFree, clip_grad_norm_, model_states, shard_plan, zero_step
