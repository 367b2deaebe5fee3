"""Play Hex against a player on a web page."""
