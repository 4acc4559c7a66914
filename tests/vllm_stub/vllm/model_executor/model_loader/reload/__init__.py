"""Weights that are loaded anew."""
