"""Benchmarks, one file each: `python -m ddpkit.bench NAME`. Times live here, never in a test.

`results` has what may be said about times, `interleave` takes them fairly, `training` has the steps
that `ddp` and `zero` compare.
"""
