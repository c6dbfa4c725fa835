"""Second forms of ddpkit's plain modules, made for speed or for harder conditions.

Most have the plain form's names and signatures, some with options added. Each file begins with what
it adds and, if measured, what that gained. Fast forms import plain ones, never the reverse.
"""
