"""Hugging Face format: configuration, weights, exported folders, lm-eval tasks."""
