"""`whet chat`, `whet generate` and `whet serve`: use a trained chat model."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.base.errors import UsageError, WhetError
from whet.base.units import valid_utf8
from whet.cli import output
from whet.cli.options import (
    ChatRun,
    Checkpoint,
    Device,
    MaxNewTokens,
    Port,
    SamplingSeed,
    SystemPrompt,
    Temperature,
    TopK,
    TopP,
)

if TYPE_CHECKING:
    from whet.recipes.chat.conversation import Turn
    from whet.recipes.chat.generation import Sampling
    from whet.recipes.chat.responder import Responder
    from whet.web.registry import RunningServer

_HELP = """/reset       start a new conversation
/save FILE   write the conversation to FILE, in a format that whet data chat reads
/help        show this help
/quit        end the conversation, like Ctrl-D
Ctrl-C stops an answer."""
_QUIT = ("/quit", "/exit")


def chat(
    run: ChatRun = None,
    system: SystemPrompt = None,
    checkpoint: Checkpoint = "best",
    max_new_tokens: MaxNewTokens = 200,
    temperature: Temperature = 0.7,
    top_k: TopK = 50,
    top_p: TopP = 0.9,
    seed: SamplingSeed = 0,
    device: Device = "auto",
) -> None:
    """Chat with a trained model in the terminal.

    \b
    whet chat runs/chat-001
    whet chat runs/chat-001 --temperature 0 --system "You are brief."

    The model gets the whole conversation. If that exceeds its context length, the oldest turns are dropped, except for
    the system prompt, and a note is printed.
    """
    from whet.api.load import load_chat_model
    from whet.run.folder import locate_checkpoint

    run, checkpoint = locate_checkpoint(run, checkpoint)
    from whet.recipes.chat.generation import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    model = load_chat_model(run, checkpoint=checkpoint, device=device)
    conversation = _Conversation(model, valid_utf8(system) if system else None, sampling, max_new_tokens=max_new_tokens)
    output.note(f"{run}: context of {model.context_length} tokens; /help for commands, Ctrl-D to quit")
    for line in _typed_lines():
        if line in _QUIT:
            return
        if line.startswith("/"):
            conversation.command(line)
        else:
            conversation.answer(line)


def generate(
    run: ChatRun = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A prompt; repeatable. Default: lines of standard input."),
    ] = None,
    system: SystemPrompt = None,
    checkpoint: Checkpoint = "best",
    max_new_tokens: MaxNewTokens = 100,
    temperature: Temperature = 0.7,
    top_k: TopK = 50,
    top_p: TopP = 0.9,
    seed: SamplingSeed = 0,
    device: Device = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print prompts, answers and why each ended, as JSON.")] = False,
    interactive: Annotated[bool, typer.Option("--interactive", help="The same as whet chat RUN.")] = False,
) -> None:
    """Print a trained chat model's answers to prompts.

    \b
    whet generate runs/chat-001 --prompt "What does shutil.copy do?"
    whet generate runs/chat-001 --prompt "Hello!" --temperature 0 --max-new-tokens 50
    whet generate runs/chat-001 --json < questions.txt
    whet generate --checkpoint runs/chat-001/checkpoints/step-000001000 --prompt "Hello!"
    """
    from whet.api.load import load_chat_model
    from whet.run.folder import locate_checkpoint, shell_path

    run, checkpoint = locate_checkpoint(run, checkpoint)
    if interactive:
        if prompt or json:
            option = "--prompt" if prompt else "--json"
            raise UsageError(
                f"--interactive cannot be combined with {option}",
                got=f"--interactive {option}",
                try_="one of the two",
            )
        chat(run, system, checkpoint, max_new_tokens, temperature, top_k, top_p, seed, device)
        return
    texts = [valid_utf8(text) for text in prompt] if prompt else list(_input_lines())
    if not texts or not all(text.strip() for text in texts):
        got = "no text" if not texts else 'an empty --prompt ""'
        raise UsageError("there is no prompt", got=got, try_=f'whet generate {shell_path(run)} --prompt "..."')
    from whet.recipes.chat.conversation import Turn
    from whet.recipes.chat.generation import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    model = load_chat_model(run, checkpoint=checkpoint, device=device)
    first = [Turn("system", valid_utf8(system))] if system else []
    prompts = [model.prompt([*first, Turn("user", text)], max_new_tokens=max_new_tokens) for text in texts]
    if len(prompts) == 1 and not json:
        is_empty = True
        for piece in model.respond(prompts[0], max_new_tokens=max_new_tokens, sampling=sampling):
            output.stream(piece.text)
            is_empty = is_empty and not piece.text.strip()
        output.stream("\n")
        if is_empty:
            output.note("an empty answer: the model ended its turn at once; train it longer")
        return
    answers = model.respond_all(prompts, max_new_tokens=max_new_tokens, sampling=sampling)
    rows = [{"prompt": text, "answer": answer, "end": end} for text, (answer, end) in zip(texts, answers, strict=True)]
    if json:
        output.result_json(rows)
    else:
        output.result("\n\n".join(f"> {row['prompt']}\n{row['answer']}" for row in rows))


def serve(
    run: ChatRun = None,
    checkpoint: Checkpoint = "best",
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model name for clients. Default: the name of the run.")
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    port: Port = 8331,
    device: Device = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print address, key and model as one line of JSON.")] = False,
) -> None:
    """Serve a trained chat model to OpenAI clients on this machine.

    \b
    whet serve runs/chat-001
    whet serve runs/chat-001 --checkpoint best --port 9000

    Implements /v1/models, /v1/chat/completions and /v1/completions, with streaming. The server listens only on this
    machine, and requires the API key that it prints, which is different each time. Requests are answered one at a time.
    Ctrl-C stops the server.
    """
    from whet.api.load import load_chat_model
    from whet.run.folder import locate_checkpoint
    from whet.web.access import ClientLimits
    from whet.web.server import require_libraries
    from whet.web.server import serve as serve_routes

    # If the web extra is not installed, fail before the model is loaded.
    require_libraries()
    run, checkpoint = locate_checkpoint(run, checkpoint)
    model = load_chat_model(run, checkpoint=checkpoint, device=device)
    from whet.recipes.chat.server.responses import error_format
    from whet.recipes.chat.server.routes import ChatRoutes

    model_name = name or run.resolve().name
    routes = ChatRoutes(model, name=model_name, max_tokens=max_new_tokens)

    def print_address(running: "RunningServer") -> None:
        address = f"{running.url}v1"
        if json:
            fields = {"base_url": address, "api_key": running.token, "model": model_name, "pid": running.pid}
            output.line_json(fields)
        else:
            output.result(f"export OPENAI_BASE_URL={address}\nexport OPENAI_API_KEY={running.token}")
            output.note(f"model name {model_name!r}; the key is valid until the server stops; Ctrl-C stops it")
        sys.stdout.flush()

    try:
        code = serve_routes(
            routes.routes(),
            name="serve",
            about=str(run.resolve()),
            port=port,
            methods=("GET", "HEAD", "POST"),
            limits=ClientLimits(body_bytes=256 * 1024),
            error_format=error_format,
            on_ready=print_address,
            on_failure=output.failed_request,
        )
    finally:
        routes.close()
    raise typer.Exit(code)


class _Conversation:
    """A conversation in the terminal: its turns, and the model that answers."""

    def __init__(self, model: "Responder", system: str | None, sampling: "Sampling", *, max_new_tokens: int) -> None:
        self._model = model
        self._system = system
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._turns: list[Turn] = []
        self._num_answers = 0
        self._reset()

    def _reset(self) -> None:
        from whet.recipes.chat.conversation import Turn

        self._turns = [Turn("system", self._system)] if self._system else []
        self._num_answers = 0

    def command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self._reset()
            output.note("new conversation")
        elif word == "/save" and rest.strip():
            self._save(Path(rest.strip()).expanduser())
        elif word == "/save":
            output.note("/save needs a file name: /save FILE")
        else:
            output.note(_HELP if word == "/help" else f"unknown command {word}:\n{_HELP}")

    def answer(self, text: str) -> None:
        """Stream an answer, and add the question and the answer to the conversation."""
        from dataclasses import replace

        from whet.recipes.chat.conversation import Turn

        turns = [*self._turns, Turn("user", text)]
        try:
            prompt = self._model.prompt(turns, max_new_tokens=self._max_new_tokens)
        except WhetError as error:
            output.error(error)
            return
        if prompt.num_dropped_turns:
            output.note(f"(the first {prompt.num_dropped_turns} turns no longer fit into the model's context)")
        # Use a different seed for each answer, so that a repeated question may get another answer. Repeating the whole
        # conversation still gives the same answers.
        sampling = replace(self._sampling, seed=self._sampling.seed + self._num_answers)
        self._num_answers += 1
        pieces: list[str] = []
        try:
            for piece in self._model.respond(prompt, max_new_tokens=self._max_new_tokens, sampling=sampling):
                pieces.append(piece.text)
                output.stream(piece.text)
        except KeyboardInterrupt:
            output.stream(" ...")
        output.stream("\n")
        answer = "".join(pieces).strip()
        self._turns = [*turns, Turn("assistant", answer)] if answer else turns[:-1]

    def _save(self, path: Path) -> None:
        import json

        if not any(turn.role == "assistant" for turn in self._turns):
            output.note("not saved: the conversation is empty")
            return
        record = {"messages": [{"role": turn.role, "content": turn.text} for turn in self._turns]}
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            output.note(f"not saved: {path}: {error.strerror}")
        else:
            output.note(f"saved: {path}")


def _typed_lines() -> Iterator[str]:
    """Yield non-empty lines from the terminal, with line editing and history, or from a redirected standard input."""
    import contextlib

    if sys.stdin is None or not sys.stdin.isatty():
        yield from map(str.strip, _input_lines())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # Enables arrow keys and history in input().
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            output.stream("\n")  # Let the shell's prompt start on a new line.
            return
        except KeyboardInterrupt:
            output.stream("\n")
            continue
        if line:
            yield valid_utf8(line)


def _input_lines() -> Iterator[str]:
    """Yield the non-empty lines of standard input, or nothing if it is closed (<&-)."""
    if sys.stdin is None:
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for line in sys.stdin:
        if line.strip():
            yield valid_utf8(line.rstrip("\n"))
