"""The Trainer and the folder of a run."""
