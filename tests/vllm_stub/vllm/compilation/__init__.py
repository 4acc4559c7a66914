"""The compilation of models."""
