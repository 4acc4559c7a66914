"""Products on Hopper whose weights are e4m3 as they are stored, with scales of blocks."""
