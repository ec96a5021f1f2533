"""Runs programs that a model wrote: under limits, without network and files (but see `jail_check.weakness`)."""
