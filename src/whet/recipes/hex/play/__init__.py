"""A web page for playing Hex against a player."""
