"""Does a script that was killed and started again go on as if nothing had happened?

`python -m ddpkit.resume_check -- torchrun --nproc-per-node 2 train.py ARGS` runs anybody's script
to its end, runs it again, kills it, starts it again, and compares step by step. Notebook 15.
"""
