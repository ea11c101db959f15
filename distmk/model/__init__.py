"""A model: its configuration, its operators, and the shard that each rank has."""
