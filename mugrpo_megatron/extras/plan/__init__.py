"""Memory, time and layouts of a run, computed from a recipe, a model's config and a cluster.

hardware  devices, clusters and assumptions      case    what a plan is about: model, layout, parameters of each rank
lengths   response lengths, continuous batching  memory  activations, state, update, engine: bytes of one rank
time      seconds of phases                      search  compares layouts, and divisions of the devices
schedules the same updates at another µ          plan    the whole plan
printing, command  as tables or JSON, on the command line
"""
