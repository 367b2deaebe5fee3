"""The run folder: everything a run leaves on disk, written so that a kill or a power cut cannot damage it."""
