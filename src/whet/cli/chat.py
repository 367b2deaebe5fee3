"""whet chat: a conversation with a trained model, in the terminal."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from whet.recipes.chat.conversation import Turn
    from whet.recipes.chat.generation.sampling import Sampling
    from whet.recipes.chat.generation.speaking import Speaker

_HELP = """/reset       forget what was said, and start anew
/save FILE   write the conversation to FILE, as whet data chat reads it
/help        this
/quit        end the conversation, as Ctrl-D does
Ctrl-C stops an answer."""
_LEAVING = ("/quit", "/exit")


def chat(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of whet train chat.")],
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What stands before the conversation.")] = None,
    checkpoint: Annotated[str, typer.Option(metavar="best|last|STEP", help="Which weights.")] = "best",
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer.")] = 200,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token each time.")] = 0.7,
    top_k: Annotated[int, typer.Option(metavar="K", help="Of the K likeliest tokens only; 0 for all.")] = 50,
    top_p: Annotated[float, typer.Option(metavar="P", help="Of as few as have P of the probability.")] = 0.9,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same words get the same answers.")] = 0,
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
) -> None:
    """Talk with a trained model.

    \b
    whet chat runs/chat-001
    whet chat runs/chat-001 --temperature 0 --system "You are brief."

    What was said before is read again for every answer. Where it is longer than the model can look back, the oldest
    turns are left out, which is said; the system turn stays.
    """
    from whet.cli import console
    from whet.cli.speaking import load_chat_model, valid_utf8
    from whet.recipes.chat.generation.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    speaker = load_chat_model(run, checkpoint=checkpoint, device=device)
    talk = _Talk(speaker, valid_utf8(system) if system else None, sampling, max_new_tokens=max_new_tokens)
    console.note(f"{run}: {speaker.num_places} tokens to look back on; /help, Ctrl-D ends")
    for line in _lines():
        if line in _LEAVING:
            return
        if line.startswith("/"):
            talk.command(line)
        else:
            talk.answer(line)


class _Talk:
    """What was said so far, and who answers."""

    def __init__(self, speaker: "Speaker", system: str | None, sampling: "Sampling", *, max_new_tokens: int) -> None:
        self._speaker = speaker
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
        """A word with a slash."""
        from whet.cli import console

        word, _, rest = line.partition(" ")
        if word == "/reset":
            self._reset()
            console.note("forgotten")
        elif word == "/save" and rest.strip():
            self._save(Path(rest.strip()).expanduser())
        elif word == "/save":
            console.note("/save FILE: which file?")
        else:
            console.note(_HELP if word == "/help" else f"{word} is not known here:\n{_HELP}")

    def answer(self, text: str) -> None:
        """Streams an answer; the question and it are remembered, unless the question cannot be asked."""
        from dataclasses import replace

        from whet.base.errors import WhetError
        from whet.cli import console
        from whet.recipes.chat.conversation import Turn

        asked = [*self._turns, Turn("user", text)]
        try:
            prompt = self._speaker.prompt(asked, max_new_tokens=self._max_new_tokens)
        except WhetError as error:
            console.error(error)
            return
        if prompt.num_left_out:
            console.note(f"(the first {prompt.num_left_out} turns are beyond what the model can look back on)")
        # Asked twice, it may answer otherwise; the whole conversation said again is answered the same.
        sampling = replace(self._sampling, seed=self._sampling.seed + self._num_answers)
        self._num_answers += 1
        said: list[str] = []
        try:
            for piece in self._speaker.say(prompt, max_new_tokens=self._max_new_tokens, sampling=sampling):
                said.append(piece.text)
                console.stream(piece.text)
        except KeyboardInterrupt:
            console.stream(" ...")
        console.stream("\n")
        answer = "".join(said).strip()
        self._turns = [*asked, Turn("assistant", answer)] if answer else asked[:-1]

    def _save(self, path: Path) -> None:
        import json

        from whet.cli import console

        if not any(turn.role == "assistant" for turn in self._turns):
            console.note("not saved: nothing was said yet")
            return
        record = {"messages": [{"role": turn.role, "content": turn.text} for turn in self._turns]}
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            console.note(f"not saved: {path}: {error.strerror}")
        else:
            console.note(f"saved: {path}")


def _lines() -> Iterator[str]:
    """What is typed, line by line, with a history of its own where there is a terminal; empty lines are left out."""
    import contextlib
    import sys

    from whet.cli import console
    from whet.cli.speaking import read_lines, valid_utf8

    if sys.stdin is None or not sys.stdin.isatty():
        yield from map(str.strip, read_lines())
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # Arrows and history for input().
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            console.stream("\n")  # What comes next does not stand behind the prompt.
            return
        except KeyboardInterrupt:
            console.stream("\n")
            continue
        if line:
            yield valid_utf8(line)
