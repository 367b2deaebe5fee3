"""Stands before the real torch on the path: whatever imports it is caught."""

raise RuntimeError("this torch raises on import")
