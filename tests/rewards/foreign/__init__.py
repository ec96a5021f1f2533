"""Reward files as users of other trainers have them; nothing in them knows of this project."""
