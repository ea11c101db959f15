"""Conversations as prompts: a model's chat template, and its rendering. `render.ChatRenderer` is the entrance."""
