"""Commands: options and work of each. Heavy imports stand in functions, so that help is fast."""
