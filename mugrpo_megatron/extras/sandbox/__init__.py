"""Runs a program that a model wrote: in its own namespaces, under limits, without network and without files."""
