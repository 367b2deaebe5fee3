"""Functions that `import whet` offers where recipes are needed: train by name, check, compare, search."""
