"""The command line: one function per command. Commands render and print; everything else returns values."""
