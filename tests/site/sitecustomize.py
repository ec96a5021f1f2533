"""Every interpreter that the tests start imports this: it counts those that host an engine (`tests.costs`)."""

import os
import sys

if "mugrpo_megatron.engine.host" in sys.orig_argv and (counted := os.environ.get("ENGINE_STARTS_OF_TESTS")):
    with open(counted, "a", encoding="utf-8") as file:
        file.write("started\n")
