"""The weighted sum of the rows of a token, one from each of its experts."""
