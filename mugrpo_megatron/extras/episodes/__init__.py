"""Episodes: responses of several turns, with tools, that a user's function makes (`rollout.function`)."""
