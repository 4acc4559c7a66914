"""How the bits of a weight lie: geometry of packed blocks, codecs, layouts."""
