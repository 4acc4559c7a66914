"""A layer of experts for few tokens in one launch."""
