"""The ranks as a grid of axes, and the groups of ranks along each."""

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from .config import AXES, TrainConfig


class Mesh:
    """The ranks as a grid, and this rank's process group along each axis.

    groups: {axis: the process group of this rank's line along it, in which ranks share all other
    positions}, for each of `AXES`; and "replicas", the ranks along data and context together, which
    hold the same weights, or shards of them. Ranks along the last axis, tensor, have consecutive
    numbers, since they send most. device: "cuda" or "cpu". Every rank must make one.
    """

    def __init__(self, config: TrainConfig, device: str):
        shape = tuple(getattr(config, axis) for axis in AXES)
        mesh = init_device_mesh(device, shape, mesh_dim_names=AXES)
        self.groups: dict[str, ProcessGroup] = {axis: mesh[axis].get_group() for axis in AXES}
        # Data and context are neighbours in the grid, so one axis of both is the same grid.
        if 1 in (config.data, config.context):
            both = "context" if config.data == 1 else "data"
            self.groups["replicas"] = self.groups[both]
        else:
            shape = config.pipeline, config.replicas, config.tensor
            names = "pipeline", "replicas", "tensor"
            flat = init_device_mesh(device, shape, mesh_dim_names=names)
            self.groups["replicas"] = flat["replicas"].get_group()

    def rank(self, axis: str) -> int:
        """Return this rank's position along an axis, from 0."""
        return dist.get_rank(self.groups[axis])
