"""Devices, options, values, progress and errors of commands, and of ``bench``."""
