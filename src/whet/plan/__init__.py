"""How to execute a training on a machine: settings, each with its value, reason, source and evidence; no torch."""
