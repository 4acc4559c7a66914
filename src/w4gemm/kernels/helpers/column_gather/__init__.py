"""The gather of x's columns for a weight in act-order."""
