"""The kernel that gathers x's columns for a weight in act-order."""
