"""The kernel that adds up the rows of a token, one from each of its experts."""
