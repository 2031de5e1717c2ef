"""Raw text to token files."""
