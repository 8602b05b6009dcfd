"""The parts that the laboratory varies: where position acts, what may be seen, and attention itself."""
