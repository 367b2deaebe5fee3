"""whet's web server, with access checks for every request.

access       checks of a request: host, origin, key and limits
guard        ASGI middleware that runs all checks in order
connection   deadlines for client connections (uvicorn)
registry     running servers of this user, and opening them in the browser
server       serve(routes, ...), which combines all of these
"""
