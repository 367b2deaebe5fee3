"""The command line: one file per verb; the only room that prints. Verbs import their rooms when they run."""
