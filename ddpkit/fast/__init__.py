"""The subjects again, with the same names and signatures, made for speed or for harder conditions.

Each file begins with what it adds to its subject, and what that gained. Fast forms import subjects,
never the reverse.
"""
