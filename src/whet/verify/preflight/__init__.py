"""Preflight (`whet check`): trace a training step as a device would execute it, without needing the device."""
