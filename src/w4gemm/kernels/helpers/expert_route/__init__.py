"""The order of tokens' choices by expert."""
