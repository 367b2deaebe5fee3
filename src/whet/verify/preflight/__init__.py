"""Preflight (`whet check`): trace a training step as a device would execute it. The device is not needed."""
