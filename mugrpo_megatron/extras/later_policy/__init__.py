"""`mugrpo rollouts --policy`: stale responses under a later checkpoint."""
