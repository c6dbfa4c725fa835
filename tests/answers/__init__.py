"""Answers to exercises that are right in another way than the reference, a file a topic."""
