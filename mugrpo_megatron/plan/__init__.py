"""What a run will need and take, on paper: from a recipe, a model's config and a cluster to a plan.

models    shapes of models that are not on disk         cluster   devices, and what is assumed of them
layout    who holds which parameters                    state     weights, gradients, optimizer states
activations  what a micro-batch keeps for backward      memory    the phases of one rank, added up
lengths   how long responses are                        timing    seconds of each phase
schedule  the same run cut into other stages            search    layouts compared, the nearest valid one
make      the whole plan                                report    the plan as tables
"""
