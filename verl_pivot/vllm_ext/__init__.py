"""Everything that touches vLLM. Importing this package imports nothing of it."""
