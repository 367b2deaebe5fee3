"""Facts about this computer and about known ones; no torch in this process."""
