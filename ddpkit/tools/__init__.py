"""Tools, not algorithms: counts of bytes and hops, units, checks, a planner, a text to train on."""
