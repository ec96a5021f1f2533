"""Reads a run directory and shows its run: summary, tables and charts, as one HTML page."""
