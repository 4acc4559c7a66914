"""The attention of one new token of each sequence, from its unrotated query to its sum of values."""
