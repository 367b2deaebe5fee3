"""The report of `whet data text`: find defects in labeled texts, and write a cleaned copy. No torch."""
