"""Checkpoints: the complete state of a run as safetensors and JSON, written atomically and verified when read."""
