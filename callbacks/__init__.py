"""Callbacks, loggers and the Trainer of a run; may use lm and data."""
