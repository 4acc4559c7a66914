"""Experts by the logits of a router."""
