"""Reads a run directory and shows it: summary, tables, charts, one HTML page."""
