"""Compiled programs: memory layout, encoding, decoding, and files."""
