"""Runs a program that a model wrote: in namespaces of its own, under limits, without network and without files."""
