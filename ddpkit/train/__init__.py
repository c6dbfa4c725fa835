"""Train a small GPT on any mesh of pipeline, data, context and tensor ranks, all combined.

    python -m ddpkit.train --data 2 --tensor 2 --steps 200
    torchrun --nproc-per-node 4 -m ddpkit.train --data 2 --tensor 2 --folder run

`TrainConfig` holds the settings, and `problems` says which can't work together. A `Trainer` takes
single steps on ranks that run already; `train` does a whole training on them: it also resumes from
checkpoints, logs and saves. Notebook 15.
"""

from .config import TrainConfig, problems
from .run import audit_samples, read_log, sample_text, train
from .state import state_of, whole_parameters
from .trainer import Trainer

__all__ = [
    "TrainConfig",
    "Trainer",
    "audit_samples",
    "problems",
    "read_log",
    "sample_text",
    "state_of",
    "train",
    "whole_parameters",
]
