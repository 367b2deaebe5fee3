"""The live page and the live terminal view. Both are read-only and use few resources.

status_reader   the status of one run, updated by reading only new bytes
listing         all runs of a folder, and which of them have changed
run_cache       the runs that open pages show, rendered again only if they change
server          the server of the live page
terminal        the live view in a terminal
"""
