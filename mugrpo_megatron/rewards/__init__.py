"""The verifier: turns responses into rewards, by math-verify under strict rules or by a user's function.

Rewards are computed in worker processes, which may die at any time.
"""
