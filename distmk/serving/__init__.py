"""Serving a model: sessions, the engine, requests, sampling, tokenizer."""
