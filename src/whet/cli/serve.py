"""whet serve: a trained chat model for programs that speak OpenAI's protocol."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.web.registry import RunningServer


def serve(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of whet train chat.")],
    checkpoint: Annotated[str, typer.Option(metavar="best|last|STEP", help="Which weights.")] = "best",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call the model; the run's name if not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer.")] = 512,
    port: Annotated[int, typer.Option(metavar="N", help="The first port to try; 0 takes any.")] = 8331,
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print address, key and model as one line of JSON.")] = False,
) -> None:
    """Serve a trained model to OpenAI clients of this machine.

    \b
    whet serve runs/chat-001
    whet serve runs/chat-001 --checkpoint best --port 9000

    Knows /v1/models, /v1/chat/completions and /v1/completions, streaming too. Listens on this machine only, and opens
    with the key that it prints, which is new each time. One answer at a time, a few clients may wait. Ctrl-C ends it.
    """
    from whet.cli.speaking import load_chat_model
    from whet.cli.watch import _failed
    from whet.web.access import ClientLimits
    from whet.web.server import require_libraries
    from whet.web.server import serve as serve_routes

    require_libraries()
    speaker = load_chat_model(run, checkpoint=checkpoint, device=device)
    from whet.recipes.chat.serving.routes import Routes
    from whet.recipes.chat.serving.shapes import error_format

    called = name or run.resolve().name
    routes = Routes(speaker, name=called, most_tokens=max_new_tokens)
    try:
        code = serve_routes(
            routes.routes(),
            name="serve",
            about=str(run.resolve()),
            port=port,
            methods=("GET", "HEAD", "POST"),
            limits=ClientLimits(body_bytes=256 * 1024),
            error_format=error_format,
            on_ready=lambda running: _tell(running, model=called, as_json=json),
            on_failure=_failed,
        )
    finally:
        routes.close()
    raise typer.Exit(code)


def _tell(running: "RunningServer", *, model: str, as_json: bool) -> None:
    import sys

    from whet.cli import console

    address = f"{running.url}v1"
    if as_json:
        console.line_json({"base_url": address, "api_key": running.token, "model": model, "pid": running.pid})
    else:
        console.result(f"export OPENAI_BASE_URL={address}\nexport OPENAI_API_KEY={running.token}")
        console.note(f"the model is called {model!r}; the key is good until this ends, Ctrl-C ends it")
    sys.stdout.flush()
