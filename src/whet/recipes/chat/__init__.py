"""The chat recipe: prepare conversations, train causal language models and generate text with them."""
