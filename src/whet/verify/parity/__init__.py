"""Parity (`whet compare`): compare training on a device with the CPU, and locate the first wrong operator."""
