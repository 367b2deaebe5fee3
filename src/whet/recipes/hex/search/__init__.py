"""Looking ahead with a net: many trees at once, their leaves judged in one batch."""
