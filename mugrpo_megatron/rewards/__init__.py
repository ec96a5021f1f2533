"""From a response to a reward: math-verify with a strict policy, in worker processes that may die at any time."""
