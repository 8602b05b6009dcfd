"""From files to token ids; nothing here knows a model."""
