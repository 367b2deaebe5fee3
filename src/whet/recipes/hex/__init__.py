"""The Hex recipe: train nets that play Hex. game/ has the game itself, and play/ a web page to play it."""
