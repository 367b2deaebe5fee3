"""The command line, with one function per command. Only this package prints. All other packages return values."""
