"""Configuration files and command lines."""
