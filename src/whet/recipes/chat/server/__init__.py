"""An OpenAI-compatible HTTP server for a chat model."""
