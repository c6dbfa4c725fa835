"""Tools to inspect a run from outside.

They write traces and flight-recorder dumps, read dumps and logs, watch the ranks of any script, and
explain a hang.
"""
