"""The runtime: start ranks, watch them, and record their calls."""
