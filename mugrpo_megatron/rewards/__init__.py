"""The verifier: turns responses into rewards, by the built-in functions `math` and `code` or by a user's function.

The functions run in worker processes. A worker that dies is replaced.
"""
