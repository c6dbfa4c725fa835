"""Tests of the exercises, a file a topic: what holds for all of them, and what is special."""
