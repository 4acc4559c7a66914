"""A gated activation of two halves of each row."""
