"""Other models that take a turn in each stage, on the devices between the policy's engines and the learner.

turn         starts a guest's engines, has them do what the stage lacks, and ends them
share        the same without a learner: one process's share of a sealed stage
scoring      the jobs of guests, and how an engine does one
teacher      log-probabilities of the stage's own tokens under another model
judge        scores that another model is asked for, with its questions and answers
parts        what is done of a column, update by update, so that a killed turn goes on where it was
taking       which columns a branch takes from another run
models       a guest's files and its engine's settings, with a hook for the temperature
checks       what can be refused before the start
"""
