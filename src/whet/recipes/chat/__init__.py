"""The chat recipe: conversations, causal language models, and programs to talk to them."""
