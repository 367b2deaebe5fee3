"""The live page and the live terminal view: read-only, and gentle on the machine."""
