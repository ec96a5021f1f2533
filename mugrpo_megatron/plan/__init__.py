"""A model of what a run needs and takes: from a recipe, a model's config and a cluster to a plan.

models    shapes of models that are not on disk         cluster   devices, and what is assumed of them
layout    who holds which parameters                    case      what a plan is about
state     weights, gradients, optimizer states          activations  what a micro-batch keeps for backward
memory    the phases of one rank, added up              lengths   how long responses are, and decoding them
updating  seconds of the learner's passes               generating  seconds of the engines: stages, evaluations
timing    seconds of each phase of a stage              schedule  the same run cut into other stages
search    layouts compared, the nearest that fits       make      the whole plan
report    the plan as tables
"""
