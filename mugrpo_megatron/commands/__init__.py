"""Commands of the core: arguments, checks and work."""
