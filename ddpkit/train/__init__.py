"""Train a small GPT with everything on: any mesh of pipeline, data, context and tensor ranks.

    python -m ddpkit.train --data 2 --tensor 2 --steps 200
    torchrun --nproc-per-node 4 -m ddpkit.train --data 2 --tensor 2 --folder run

Notebook 15.
"""

from .config import TrainConfig, problems
from .trainer import Trainer

__all__ = ["TrainConfig", "Trainer", "problems"]
