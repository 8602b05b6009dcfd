"""Probes: synthetic tasks that tell positional encodings and attention patterns apart, `task=probe`; no torch."""
