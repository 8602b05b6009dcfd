"""Benchmarks, side by side with the alternatives that a user would choose: `python -m speechformer.bench`."""
