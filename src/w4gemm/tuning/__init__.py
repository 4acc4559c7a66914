"""Measuring configs: the tuner, its timer and workload, random weights, rooflines, and facts of measured numbers."""
