"""Readers of labeled texts from text files, tables and saved datasets. No torch."""
