"""A package that shadows the real torch and reports any import."""

raise RuntimeError("this torch raises on import")
