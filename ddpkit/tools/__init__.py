"""Instruments: what things cost in time, bytes and bits, and a text to train on. No algorithms."""
