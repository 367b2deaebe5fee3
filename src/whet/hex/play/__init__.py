"""A game with a person: the same view of a game for the terminal and for a page.

view       all there is to see of a game: board, chances, suggestions, and what the player would do
drawing    the board as lines of text
talk       a game in words, line by line
routes     which address of the page answers what
server     `serve_game(player, ...)`: all of it behind the guard
static/    the page: plain modules of JavaScript, without a network
"""
