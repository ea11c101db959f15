"""An HTTP server of an engine: OpenAI's API, metrics, and a page to chat on."""
