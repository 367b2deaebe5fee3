"""The one guard of every page and server of whet: who may ask, what, how much and how slowly.

limits       how much a client may send, and how long it may take
refusal      a request that is not granted, in three lines
key          the secret of one server: its token, its cookie, and links that open it once
origin       was this request meant for us, and did our own page send it?
guard        all checks around an application, in their order
connection   deadlines of one connection (uvicorn)
listening    which address and port; loopback unless somebody insists
running      servers that run now, for other commands of the same user
browser      opening a link without showing it to other users of the machine
serving      all of it together: serve(routes, ...)
"""
