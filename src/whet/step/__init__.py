"""One optimizer step: the only code that trains."""
