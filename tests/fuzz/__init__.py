"""Random problems held to a reference of their own: see ``fuzz.run``."""
