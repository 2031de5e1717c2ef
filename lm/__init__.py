"""The network, how it learns, and its forms on disk; knows neither data nor runs."""
