"""The catalogue of methods."""
