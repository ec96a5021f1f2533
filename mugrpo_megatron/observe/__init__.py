"""The records of a run about itself: metrics and their log, progress bars, versions and the machine."""
