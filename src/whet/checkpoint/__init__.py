"""Checkpoints: the complete state of a run in safetensors and JSON files, written atomically and verified when read."""
