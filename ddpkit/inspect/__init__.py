"""Instruments that look at a run from outside: traces, dumps, sessions of any script, explain."""
