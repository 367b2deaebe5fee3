"""The functions of `import whet` that need recipes: training by name, checks, comparisons and searches."""
