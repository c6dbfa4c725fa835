"""Pipeline parallelism: a model's layers across ranks, micro-batches one after the other."""

from .dry_run import held, idle, messages, rank_of_stage, simulate, validate
from .schedules import gpipe, interleaved, one_f_one_b, parse, zero_bubble

__all__ = [
    "gpipe",
    "held",
    "idle",
    "interleaved",
    "messages",
    "one_f_one_b",
    "parse",
    "rank_of_stage",
    "simulate",
    "validate",
    "zero_bubble",
]
