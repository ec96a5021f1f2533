"""How long a test waits for what has to come: a process that ends, a message, a rank.

No machine, however slow or busy, needs an hour for what an idle one does in a minute; what takes longer hangs, and is
named by the test that waits. A test that waits longer than three hours is ended (`faulthandler_timeout` in
pyproject.toml).
"""

PATIENCE_S = 3600.0
