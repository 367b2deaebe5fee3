"""The guard in front of every page and server of whet."""
