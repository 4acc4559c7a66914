"""Common part of the plugins of serving engines: which layers are taken over, and a weight from an engine's tensors."""
