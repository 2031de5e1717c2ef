"""Files, locks, processes and threads of the operating system."""
