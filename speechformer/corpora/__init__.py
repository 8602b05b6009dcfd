"""Files in, token ids out. Nothing here knows a model."""
