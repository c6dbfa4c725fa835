"""Benchmarks, one file each: `python -m ddpkit.bench NAME`. Times live here, never in a test.

`interleave` takes times fairly, `results` has the claims they support, `training` the steps that
`ddp`, `zero` and `fsdp` compare.
"""
