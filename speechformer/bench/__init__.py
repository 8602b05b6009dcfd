"""How fast we are, side by side with what a user would pick instead: `python -m speechformer.bench`."""
