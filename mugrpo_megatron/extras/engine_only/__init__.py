"""Generation without a learner, by processes that share only the run directory: batch jobs on any machines."""
