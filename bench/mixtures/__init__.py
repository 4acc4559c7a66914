"""Weights of experts in every implementation's form, and the points that bench.grouped measures."""
