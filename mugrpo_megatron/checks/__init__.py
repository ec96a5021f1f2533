"""Checks that refuse a run before it starts; torch is imported only where a recipe's key needs it."""
