"""Facts about this computer and known machines; no torch."""
