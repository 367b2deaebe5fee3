"""Public functions that need recipes: training by name, checks, comparisons and searches."""
