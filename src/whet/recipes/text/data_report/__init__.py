"""The report of `whet data text`: detect defects in labeled texts, and write a cleaned copy. No torch."""
