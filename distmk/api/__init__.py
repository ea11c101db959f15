"""The Python API: LLM, AsyncLLM, prompts and outputs."""
