"""The network and how it learns; knows no files and no runs."""
