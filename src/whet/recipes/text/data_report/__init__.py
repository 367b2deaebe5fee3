"""`whet data text`: report defects in labeled texts and write a cleaned copy. No torch."""
