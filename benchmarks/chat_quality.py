"""Bits per byte of small chat models on held-out answers: a recursive model, a GPT of equal compute, and a byte 5-gram.

    python benchmarks/chat_quality.py --data DIR [--device cuda] [--minutes 4] [--out FILE.json] [--words key=value ...]

DIR holds train.json, dev.json and test.json of conversations (chat-sgd); without --data, the folder chat-sgd in
WHET_TEST_DATA. Each model is trained like `whet train chat` for at most --minutes: a short run measures the time of a
step, and as many epochs follow as fit, at most --epochs. The checkpoint with the best validation result is evaluated on
the test split, in bits per byte of the assistants' texts. The baseline is an interpolated byte 5-gram, trained on the
same conversations and scored on the same bytes with the same context; both also predict where an answer ends. Finally,
each model answers the questions of one test conversation, with its own earlier answers as context.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from byte_ngram import ByteModel

from whet.base import env
from whet.config.resolve import resolve_config
from whet.data.batch import MicroBatch
from whet.device.open import open_device
from whet.recipes.chat.conversation import Turn
from whet.recipes.chat.data import read_chat
from whet.recipes.chat.dataset import ChatDataset, ChatSplit, open_dataset
from whet.recipes.chat.evaluation import merge_metrics, partial_metrics
from whet.recipes.chat.generation import Sampling
from whet.recipes.chat.prepare import PrepareOptions, prepare_data
from whet.recipes.chat.recipe import ChatRecipe
from whet.recipes.chat.responder import Responder
from whet.recipes.chat.tokenizer import ChatTokenizer
from whet.recipes.runner import train_recipe
from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.weights import load_weights

BAR = 0.8
"""Target: bits per byte relative to the 5-gram."""
SIZES = ("arch.preset=tiny", "arch.H_cycles=2", "arch.L_cycles=2")
TRAINING = ("global_batch_size=32", "lr=6e-4", "dropout=0.2", "ema=true", "weight_decay=0.1")
KINDS = {"trm": "arch.kind=trm", "gpt": "arch.kind=gpt"}
ON_CUDA = ("precision=bf16", "graph=on")
PROBE_STEPS = 24
SPEAKERS = {"system": b"\x01", "user": b"\x02", "assistant": b"\x03", "tool": b"\x05"}
END = b"\x04"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=4.0, help="for each model, its short run included")
    parser.add_argument("--epochs", type=int, default=30, help="at most")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--models", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--words", nargs="+", default=[], help="more key=value for every training")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    data = given.data or (Path(root) / "chat-sgd" if (root := env.read("WHET_TEST_DATA")) else None)
    if data is None:
        sys.exit("say where the conversations lie: --data DIR, or WHET_TEST_DATA")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "prepared"
        prepare_data(
            data,
            folder,
            PrepareOptions(vocab_size=given.vocab, max_length=1024),
            on_progress=lambda _what, _done, _total: None,
        )
        bar = byte_bits(open_dataset(folder))
        print(f"byte 5-gram: {bar:.4f} bits per byte; {BAR:.0%} of it is {BAR * bar:.4f}", flush=True)
        results = [measure(kind, folder, Path(scratch), bar, given) for kind in given.models]
        if given.out:
            logged = {"five_gram": bar, "models": [{k: v for k, v in r.items() if k != "speaker"} for r in results]}
            given.out.write_text(json.dumps(logged, indent=1) + "\n")
        for result in results:
            dialogue(result["speaker"], open_dataset(folder).test, result["model"])
    if any(result["share"] > BAR for result in results):
        sys.exit(1)


# --- baseline --------------------------------------------------------------------------------------------------------


def byte_bits(dataset: ChatDataset) -> float:
    """Return bits per byte of the 5-gram on the answers of the test split, ends of answers included."""
    model = ByteModel([script(turns)[0] for turns in conversations(dataset.train, dataset.tokenizer)])
    bits, num_bytes = 0.0, 0
    for turns in conversations(dataset.test, dataset.tokenizer):
        text, is_learned = script(turns)
        bits -= float(model.log2(text)[is_learned].sum())
        num_bytes += sum(len(turn.text.encode()) for turn in turns if turn.role == "assistant")
    assert num_bytes == dataset.test.facts.loss_bytes
    return bits / num_bytes


def script(turns: list[Turn]) -> tuple[bytes, Any]:
    """Return a conversation as bytes, and a mask of answers and their ends."""
    text, is_learned = b"\0" * 4, [False] * 4
    for turn in turns:
        reported = turn.text.encode() + END
        text += SPEAKERS[turn.role] + reported
        is_learned += [False, *[turn.role == "assistant"] * len(reported)]
    return text, np.array(is_learned)


def conversations(part: ChatSplit, tokenizer: ChatTokenizer) -> Iterator[list[Turn]]:
    """Decode the documents of a split."""
    roles = {number: role for role, number in tokenizer.role_ids.items()}
    for document in part:
        turns: list[tuple[str, list[int]]] = []
        for number in document.tokens.tolist():
            if number in roles:
                turns.append((roles[number], []))
            elif number != tokenizer.end_id:
                turns[-1][1].append(number)
        yield [Turn(role, tokenizer.decode(ids)) for role, ids in turns]  # type: ignore[arg-type]


# --- the models ------------------------------------------------------------------------------------------------------


def measure(kind: str, folder: Path, scratch: Path, bar: float, given: argparse.Namespace) -> dict[str, Any]:
    """Train one kind of model within its minutes, and evaluate the best checkpoint on the test split."""
    began = time.perf_counter()
    device = open_device(given.device).device
    words = [
        f"data={folder}",
        *SIZES,
        *TRAINING,
        KINDS[kind],
        *(ON_CUDA if device.kind == "cuda" else ()),
        *given.words,
    ]
    probe = train(kind, [*words, f"max_steps={PROBE_STEPS}", "eval_every=1000000"], scratch / f"{kind}-probe", given)
    step_seconds = pace(probe)
    config = resolve_config(ChatRecipe.Config, words).config
    data = read_chat(config)
    steps_of_epoch = math.ceil(data.num_rows / config.global_batch_size)
    left = 60 * given.minutes - (time.perf_counter() - began)
    # A tenth of the time is reserved for evaluations and checkpoints.
    epochs = max(1, min(given.epochs, int(0.9 * left / (step_seconds * steps_of_epoch))))
    last = [f"max_steps={max(1, int(0.9 * left / step_seconds))}"] if epochs == 1 else []
    run = train(kind, [*words, f"epochs={epochs}", *last], scratch / kind, given)
    seconds = time.perf_counter() - began
    kept = open_run(run).kept
    speaker = ChatRecipe().load_generator(kept)
    step = load_weights(run, speaker.model, checkpoint="best")
    device.put_model(speaker.model)
    with torch.no_grad():
        test = merge_metrics(speaker.model, [partial_metrics(speaker.model, batches(data.test, device))], None)
    result = {
        "model": kind,
        "words": data.arch.summary(data.tokenizer.vocab_size),
        "epochs": epochs,
        "best_step": step,
        "step_seconds": step_seconds,
        "tokens_per_second": config.global_batch_size * data.context_length / step_seconds,
        "seconds": seconds,
        "share": test["bits_per_byte"] / bar,
        **{f"test_{name}": value for name, value in test.items()},
    }
    print(
        f"{kind}: {test['bits_per_byte']:.4f} bits per byte ({result['share']:.0%} of the 5-gram's), "
        f"perplexity {test['perplexity']:.2f}; {epochs} epochs, best at step {step:,}, "
        f"{result['tokens_per_second']:,.0f} tokens/s, {seconds:.0f} s in all\n     {result['words']}",
        flush=True,
    )
    return {**result, "speaker": speaker}


def train(kind: str, words: list[str], run: Path, given: argparse.Namespace) -> Path:
    """Train like `whet train chat`."""
    resolved = resolve_config(ChatRecipe.Config, words)
    train_recipe(ChatRecipe(), resolved, run=run, device=given.device, command=["chat_quality", kind])
    return run


def pace(run: Path) -> float:
    """Return the seconds per step in the second half of a run, without the warm-up."""
    taken = [
        sum(
            seconds
            for phase, seconds in event.fields["seconds"].items()
            if phase not in ("evaluate", "save", "cooldown")
        )
        for event in read_events(run, kinds=("step",))
    ]
    return float(np.median(taken[len(taken) // 2 :]))


def batches(columns: dict[str, torch.Tensor], device: Any, *, size: int = 16) -> Iterator[MicroBatch]:
    """Yield a split as micro-batches."""
    total = len(columns["tokens"])
    for start in range(0, total, size):
        fields = {name: device.put(column[start : start + size]) for name, column in columns.items()}
        yield MicroBatch(fields=fields, ids=np.arange(start, min(total, start + size)))


def dialogue(speaker: Responder, part: ChatSplit, name: str) -> None:
    """Return the questions of one test conversation with the model's own answers."""
    conversation = next(talk for talk in conversations(part, speaker.tokenizer) if 10 <= len(talk) <= 14)
    turns: list[Turn] = []
    print(f"\n--- {name}")
    for number, turn in enumerate(turn for turn in conversation if turn.role == "user"):
        turns.append(turn)
        prompt = speaker.prompt(turns, max_new_tokens=80)
        how = Sampling(temperature=0.5, seed=number)
        answer = "".join(piece.text for piece in speaker.respond(prompt, max_new_tokens=80, sampling=how))
        turns.append(Turn("assistant", answer))
        print(f"user       {turn.text}\nassistant  {answer}")


if __name__ == "__main__":
    main()
