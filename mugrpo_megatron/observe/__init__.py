"""Metric definitions, the metric log, progress bars, and the versions and machine of a run."""
