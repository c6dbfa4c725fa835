"""Check that a training script, killed and started again, goes on as if nothing had happened.

`python -m ddpkit.resume_check -- torchrun --nproc-per-node 2 train.py ARGS` runs any script to its
end, runs it again, kills it, starts it again, and compares update by update. Notebook 15.
"""
