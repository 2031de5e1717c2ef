"""Processes of a run: launchers, peers, signals, console."""
