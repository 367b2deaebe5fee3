"""The self-test: is this device complete, right, exact and how fast? One examination, one file to share.

case         what one check is, and what it may find
child        runs checks in a process of its own, because a GPU's driver may abort it
ward         starts such processes, waits for them with a limit, and goes on behind one that died
examination  all checks in their order, within a budget; the record that is shared
privacy      takes names and paths out of what is shared
words        an examination as lines for a screen
cases/       the checks themselves; the only part that needs torch
"""
