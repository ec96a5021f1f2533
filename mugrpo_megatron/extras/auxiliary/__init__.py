"""Auxiliary models: a teacher or a judge scores each stage on the run's devices, between generation and optimization.

phase              starts an auxiliary model's engines, has them compute what the stage lacks, and stops them
shard              the same without a learner: one process's shard of a sealed stage
scoring            the models and their jobs on a stage, and the loop of one engine
jobs               a teacher's log-probabilities of the stage's own tokens, and a judge's scores
score_reader       a judge's scores, read in workers with a reward's limits
parse              what runs in such a worker: the user's function that reads a score from a judge's answer
auxiliary_columns  the columns that auxiliary models add to a stage, parts of unfinished columns, links in a branch
models             an auxiliary model's files and its engine's recipe, with a hook for the temperature
checks             what is checked, and refused, before a run starts
"""
