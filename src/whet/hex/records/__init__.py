"""Recorded games: `.trmph`, HexWorld links and plain lists of moves, from whichever side they were written down.

notation     one game as text, read and written
orientation  which edges does the first player join in these games? Found by replay
reading      all games of a file or folder, as they stream by; what is wrong with them is counted and named
"""
