"""Options, declared once, and read from keywords, the command line and files. Does not import torch."""
