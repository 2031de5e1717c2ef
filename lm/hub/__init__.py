"""Hugging Face form of models: configuration, weights, exported folders, tasks of lm-eval."""
