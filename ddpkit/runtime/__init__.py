"""Start ranks as processes, watch them for failures, and record their torch.distributed calls."""
