"""Token files: prepared folders and those of other projects."""
