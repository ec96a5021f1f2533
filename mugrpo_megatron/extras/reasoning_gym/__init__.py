"""`data.train = "reasoning_gym:TASK"`: problems and verifiers of the package reasoning-gym."""
