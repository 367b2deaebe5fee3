"""What is fastest here? The real step, timed in fair pairs under a budget, with evidence for every answer."""
