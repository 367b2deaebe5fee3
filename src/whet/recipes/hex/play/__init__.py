"""Play Hex against a player, in the terminal and on a web page."""
