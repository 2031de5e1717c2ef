"""Checkpoints: when they are saved, their files, and resuming from them."""
