"""Checkpoint formats, packed by their producers' code or by their definition, beside an oracle for each."""
