"""Getting better by oneself: play with a search, learn from it, keep what wins; generation by generation."""
