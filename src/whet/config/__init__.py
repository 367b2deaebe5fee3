"""Options, declared once, and read from keywords, the command line and files; no torch."""
