"""Checkpoints: everything an exact resume needs, as safetensors and JSON, published whole or not at all."""
