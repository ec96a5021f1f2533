"""A model of what a run needs: from a recipe, a model's config and a cluster to memory, time and layouts.

hardware     devices, clusters and assumptions            models      shapes of models without their weights
case         what a plan is about                         layout      parameters of each rank
activations  what a micro-batch keeps for backward        memory      state, update, engine: bytes of one rank
lengths      response lengths, continuous batching        generation  seconds of engines and verifier
training     seconds of the learner                       time        seconds of a stage, and of whole schedules
search       compares layouts                             plan        the whole plan
printing     the plan as tables or JSON
"""
