"""A compiled program: memory layout, bytes, and the file they are kept in."""
