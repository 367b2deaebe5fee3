"""The web server of whet, with access checks in front of every page.

access       checks of a request: host, origin, key, limits
guard        all checks around an application, in their order
connection   deadlines of client connections (uvicorn)
registry     running servers of this user, and opening one in the browser
server       serve(routes, ...): all of it together
"""
