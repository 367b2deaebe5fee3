"""Who plays better? Paired openings, both colours, an interval."""
