"""Generation without a learner: processes that share only the run directory, in batch jobs or ahead of the training."""
