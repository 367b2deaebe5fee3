"""The Hex recipe: the game (game/), playing it (play/), and training nets for it."""
