"""The readable reference: positions, patterns, attention, dropout, and the block built from them."""
