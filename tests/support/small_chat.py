"""Small chat fixtures: a tokenizer, models of a few thousand weights, and a folder of prepared conversations."""

import json
from pathlib import Path

import torch

from whet.recipes.chat.architecture import ChatArch
from whet.recipes.chat.model import CausalModel, build_model
from whet.recipes.chat.prepare import PrepareOptions, prepare_data
from whet.recipes.chat.responder import Responder
from whet.recipes.chat.tokenizer import ChatTokenizer

SIZES = {"hidden_size": 32, "L_layers": 1, "num_heads": 2, "seq_len": 48}
SHAPES = (
    {},
    {"H_cycles": 1, "L_cycles": 1},
    {"H_cycles": 3, "L_cycles": 2, "supervision": 2},
    {"kind": "gpt"},
    {"kind": "gpt", "match": "parameters", "tied": True},
)
"""Models with every variant of recursion."""
WORDS = ("arch.hidden_size=32", "arch.L_layers=1", "arch.num_heads=2", "arch.seq_len=64", "threads=1")
THINGS = ("tea", "pie", "soup", "milk", "rice", "beans", "corn", "salt")


def small_model(*, vocab_size: int = 60, **shape: object) -> CausalModel:
    torch.manual_seed(0)
    return build_model(ChatArch.model_validate({**SIZES, **shape}), vocab_size=vocab_size).eval()


def small_tokenizer() -> ChatTokenizer:
    return ChatTokenizer.train(["hello there, what do you want?"] * 4, vocab_size=300)


def small_speaker(**shape: object) -> Responder:
    tokenizer = small_tokenizer()
    return Responder(small_model(vocab_size=tokenizer.vocab_size, **shape), tokenizer, context_length=48)


def prepared(folder: Path, *, num_talks: int = 32) -> Path:
    """This many short conversations, whose second answer is in the first question."""
    talks = [
        [f"I want {thing}.", "Yes.", f"What? {number}", f"You want {thing}."] for number in range(4) for thing in THINGS
    ]
    file = folder / "talks.jsonl"
    roles = ("user", "assistant") * 2
    lines = [
        json.dumps({"messages": [{"role": r, "content": t} for r, t in zip(roles, talk, strict=True)]})
        for talk in talks[:num_talks]
    ]
    file.write_text("\n".join(lines))
    options = PrepareOptions(vocab_size=512, max_length=64, train_split=0.75)
    prepare_data(file, folder / "prepared", options, on_progress=lambda _what, _done, _total: None, in_threads=False)
    return folder / "prepared"
