"""The kernel that quantizes activations to e4m3, a scale for each token."""
