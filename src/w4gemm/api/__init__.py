"""Products and layers as users call them, the checks of their arguments, and the way from there to a launch."""
