"""A small application behind the guard, with deadlines short enough for a test: reads, changes, streams, fails."""

import asyncio
import json
import sys

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from whet.web.access import ClientLimits, HttpError
from whet.web.server import serve

LIMITS = ClientLimits(receive_seconds=1.0, idle_seconds=1.0, stall_seconds=1.0, connections=64, body_bytes=1000)
SECRET = "only for the terminal"
changes: list[object] = []


async def read(request: Request) -> Response:
    return JSONResponse({"changes": len(changes)})


async def change(request: Request) -> Response:
    changes.append(await request.json())
    return JSONResponse({"changes": len(changes)})


async def large(request: Request) -> Response:
    return PlainTextResponse("x" * 8_000_000)


async def stream(request: Request) -> Response:
    async def ticks():
        while True:
            yield b"data: tick\n\n"
            await asyncio.sleep(0.05)

    return StreamingResponse(ticks(), media_type="text/event-stream")


async def flood(request: Request) -> Response:
    async def much():
        while True:
            yield b"data: " + b"x" * 100_000 + b"\n\n"
            await asyncio.sleep(0)

    return StreamingResponse(much(), media_type="text/event-stream")


async def fail(request: Request) -> Response:
    raise ValueError(SECRET)


async def refuse(request: Request) -> Response:
    raise HttpError(404, "no such thing", got="<b>\x1b[2J", try_="another")


PATHS = ("/", "/change", "/large", "/stream", "/flood", "/fail", "/refuse")

if __name__ == "__main__":
    handlers = (read, change, large, stream, flood, fail, refuse)
    routes = [
        Route(path, handler, methods=["POST"] if handler is change else None)
        for path, handler in zip(PATHS, handlers, strict=True)
    ]
    sys.exit(
        serve(
            routes,
            name="guarded",
            about="a test",
            port=0,
            methods=("GET", "HEAD", "POST"),
            limits=LIMITS,
            on_ready=lambda server: print(
                json.dumps({"url": server.url, "link": server.link(), "pid": server.pid}), flush=True
            ),
            on_failure=lambda error: print(f"failed: {error}", flush=True),
        )
    )
