"""Episodes: responses of several turns, with tools, made by a user's function or program.

The keys are `rollout.function` and `rollout.agent`.
"""
