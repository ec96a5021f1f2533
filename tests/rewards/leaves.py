"""A reward module that ends the process which imports it."""

import sys

sys.exit("not here")
