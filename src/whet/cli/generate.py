"""whet generate: what a trained chat model answers."""

from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of whet train chat.")],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A question; repeatable. Else standard input.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What stands before every question.")] = None,
    checkpoint: Annotated[str, typer.Option(metavar="best|last|STEP", help="Which weights.")] = "best",
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest answer.")] = 100,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token each time.")] = 0.7,
    top_k: Annotated[int, typer.Option(metavar="K", help="Of the K likeliest tokens only; 0 for all.")] = 50,
    top_p: Annotated[float, typer.Option(metavar="P", help="Of as few as have P of the probability.")] = 0.9,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The same seed gives the same answer.")] = 0,
    device: Annotated[str, typer.Option(help="auto, mps, cuda, cuda:1 or cpu.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Questions, answers and why they end, as JSON.")] = False,
    interactive: Annotated[bool, typer.Option("--interactive", help="The same as whet chat RUN.")] = False,
) -> None:
    """Answers of a trained chat model.

    \b
    whet generate runs/chat-001 --prompt "What does whet probe do?"
    whet generate runs/chat-001 --prompt "Hello!" --temperature 0 --max-new-tokens 50
    whet generate runs/chat-001 --json < questions.txt
    """
    from whet.base.errors import UsageError

    if interactive:
        from whet.cli.chat import chat

        if prompt or json:
            unfit = "--prompt" if prompt else "--json"
            raise UsageError(f"a conversation takes no {unfit}", got=f"--interactive {unfit}", try_="one of them")

        chat(run, system, checkpoint, max_new_tokens, temperature, top_k, top_p, seed, device)
        return
    from whet.cli import console
    from whet.cli.speaking import as_turns, read_lines, valid_utf8

    given = [valid_utf8(text) for text in prompt] if prompt else list(read_lines())
    if not given or not all(text.strip() for text in given):
        got = "no text" if not given else 'an empty --prompt ""'
        raise UsageError("there is no question", got=got, try_=f'whet generate {run} --prompt "..."')
    from whet.cli.speaking import load_chat_model
    from whet.recipes.chat.generation.sampling import Sampling

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    speaker = load_chat_model(run, checkpoint=checkpoint, device=device)
    prompts = [speaker.prompt(as_turns(text, system), max_new_tokens=max_new_tokens) for text in given]
    if len(prompts) == 1 and not json:
        for piece in speaker.say(prompts[0], max_new_tokens=max_new_tokens, sampling=sampling):
            console.stream(piece.text)
        console.stream("\n")
        return
    said = speaker.answer_all(prompts, max_new_tokens=max_new_tokens, samplings=[sampling] * len(prompts))
    rows = [{"prompt": text, "answer": answer, "end": end} for text, (answer, end) in zip(given, said, strict=True)]
    if json:
        console.result_json(rows)
    else:
        console.result("\n\n".join(f"> {row['prompt']}\n{row['answer']}" for row in rows))
