"""Instruments: costs in time, bytes and bits, checks, and a text to train on. No algorithms."""
