"""The commands of the core: their arguments, their checks, and what they do."""
