"""Whole networks: token ids in, logits out. No losses, no files."""
