"""Complete networks, from token ids to logits. No losses and no files."""
