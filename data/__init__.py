"""Tokens from disk to batches; knows no model."""
