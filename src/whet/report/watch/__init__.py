"""The live page: a server that reads run folders and tells a browser what is new in them. It can slow or stop nothing.

line       one run in a list, kept up to date by the bytes that are new
ends       the same from the first and last lines of a log that has no index
listing    all runs of a folder; only those that changed are read again
opening    a run whose log takes long to read
looking    one run as a page shows it, made again only when it changed
pace       how long to rest after a look
paging     the events of a run, page by page from the newest
feed       who is listening, and what changed for each
files      the page itself: a few files by name
routes     which address answers what
server     `watch_runs(folder, ...)`: all of it together
"""
