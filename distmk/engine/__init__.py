"""The engine: sessions, launches, and the requests that they serve."""
