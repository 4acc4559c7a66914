"""Operators that vLLM chooses implementations of."""
