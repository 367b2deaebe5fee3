"""Reads run folders and renders them: one model of a run, several renderers."""
