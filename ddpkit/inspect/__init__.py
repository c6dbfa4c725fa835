"""Tools to inspect a run from outside: traces, dumps, sessions for any script, hang reports."""
