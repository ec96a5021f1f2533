"""Other models that take a turn in each stage, on the devices between the policy's engines and the learner.

turn         starts an auxiliary model's engines, has them do what the stage lacks, and ends them
share        the same without a learner: one process's share of a sealed stage
scoring      the columns that auxiliary models compute or a branch takes, and how an engine works on one
jobs         a teacher's log-probabilities of the stage's own tokens, and a judge's scores
parts        what is done of a column, update by update, so that a killed turn goes on where it was
models       an auxiliary model's files and its engine's settings, with a hook for the temperature
checks       what can be refused before the start
"""
