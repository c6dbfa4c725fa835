"""Tools, not algorithms: counts of bytes and hops, units, checks, and a text to train on."""
