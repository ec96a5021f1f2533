"""`mugrpo rollouts --policy`: compares a stage's responses with the policy of a later checkpoint."""
