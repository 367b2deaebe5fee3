"""The live page and the live terminal view. Both are read-only and use few resources.

status_reader   the status of one run, updated by reading only new bytes
listing         all runs of a folder, and which of them changed
run_cache       the runs that pages look at, rendered again only when they change
server          the routes of the live page
terminal        the live view in a terminal
"""
