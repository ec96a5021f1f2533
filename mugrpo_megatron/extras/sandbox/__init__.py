"""Runs a program that a model wrote, under limits. The sandbox `namespaces` also takes network and files from it."""
