"""Files that several rooms read or write. Imports neither torch nor anything slow, except in modules named after it."""
