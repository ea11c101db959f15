"""A model: its configuration, its operators, and the shard each rank holds."""
