"""Rows of texts as they lie on disk, whatever their form: streamed, with what is wrong with each; no torch."""
