"""The norm of rows by the root of their mean square."""
