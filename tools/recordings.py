"""Record short training runs and compare two recordings bit for bit.

    python tools/recordings.py record --whet .venv/bin --out before
    python tools/recordings.py record --whet .venv/bin --out after
    python tools/recordings.py compare before after [--renames renames.json]

`record` trains every recipe and every example on the CPU with fixed seeds: uninterrupted, stopped with SIGTERM and
resumed, killed with SIGKILL and resumed. Each run becomes one JSON file with the SHA-256 of every tensor of its last
checkpoint, its losses, metrics, plan and events. Times, durations, rates, sizes and paths are removed.

A file of renames translates an older recording. All of its tables are optional, and null removes an entry:

    {"keys": {...}, "kinds": {...}, "fields": {...}, "settings": {...}, "values": {...}, "tensors": {...}}

    keys      options of the command line; `record --renames` translates its commands with them
    kinds     kinds of events              fields   names of event fields, at any depth
    settings  names of plan settings       values   whole strings or words (true, 3) among event and plan values
    tensors   prefixes of tensor names in checkpoints
"""

import argparse
import functools
import hashlib
import json
import os
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

THIS_FILE = str(Path(__file__).absolute())
Renames = Mapping[str, Mapping[str, str | None]]

SHORT = ("max_steps=12", "eval_every=5", "checkpoint_steps=4", "threads=1")
CHAT_OPTIONS = ("--out", "chat", "--vocab-size", "512", "--max-length", "64", "--train-split", "0.75")
TINY_CHAT = ("data={inputs}/chat", "arch.hidden_size=32", "arch.L_layers=1", "arch.num_heads=2", "arch.seq_len=64")
TINY_PUZZLE = (
    "puzzles=70", "global_batch_size=16", "arch.hidden_size=16", "arch.num_heads=2", "arch.L_layers=1",
    "arch.L_cycles=1", "arch.halt_max_steps=4", "arch.halt_exploration_prob=0.5", "warmup_steps=2",
)  # fmt: skip
TINY_HEX = ("size=5", "games=40", "arch.depth=1", "arch.width=8", "global_batch_size=64")
SELFPLAY = (
    "selfplay=True", "size=3", "games=20", "epochs=1", "arch.depth=1", "arch.width=8", "global_batch_size=16",
    "loop.games=40", "loop.simulations=4", "loop.gate_games=8", "loop.generations=2", "threads=1",
)  # fmt: skip
TINY_BERT = ("data={inputs}/rows.jsonl", "model={inputs}/bert", "global_batch_size=8", "lr=1e-3")

RECIPES: Mapping[str, Sequence[str]] = {
    "text": ("text", *SHORT),
    "text-split": ("text", *SHORT, "micro_batch=8", "ema=True", "clip=0.5", "schedule=cosine", "arch.layers=2"),
    "text-bf16": ("text", *SHORT, "precision=bf16", "activation_checkpointing=True"),
    "text-pretrained": ("text", *SHORT, *TINY_BERT),
    "text-lora": ("text", *SHORT, *TINY_BERT, "lora=4"),
    "chat-trm": ("chat", *SHORT, *TINY_CHAT, "arch.supervision=2"),
    "chat-gpt": ("chat", *SHORT, *TINY_CHAT, "arch.kind=gpt"),
    "puzzle": ("puzzle", *SHORT, *TINY_PUZZLE),
    "hex": ("hex", *SHORT, *TINY_HEX),
    "hex-selfplay": ("hex", *SELFPLAY),
}
ONLY_STRAIGHT = ("text-bf16", "text-lora")
"""Their interrupted runs would repeat what others show."""

EXAMPLES = ("three_lines.py", "own_loop.py", "by_feature/average_and_early_stop.py")
"""Examples that take a run folder and resume."""
EXAMPLES_WITH_EXIT = ("own_loop.py",)
"""Examples that call sys.exit with the exit code of the session."""
EXAMPLES_WITHOUT_RUN = ("by_feature/token_weights.py", "tiny_whet.py")

STOP_AFTER, STOP_SELFPLAY_AFTER, STOP_EXAMPLE_AFTER = 7, 3, 30
KILL_DELAY_SECONDS = 1.5
"""A checkpoint that is being written when a run is killed is complete by then, so that the same one is resumed."""

TIMED_KINDS = ("health", "throttle", "pressure")
"""Events that depend on the clock or on the load of the machine."""
TIMED_FIELDS = (
    "time",
    "seconds",
    "bytes",
    "samples_per_second",
    "free_bytes",
    "memory",
    "beside",
    "background",
    "path",
    "pid",
)
PROSE = ("reason", "again", "changed", "cure", "try", "action", "message")
"""Fields that hold sentences: whether they are there is compared, not their wording."""
LOAD_SETTINGS = ("memory_gb",)
"""Settings that depend on what else runs on the machine: not compared."""
REPLACED = ("step", "eval", "epoch")
"""Kinds that a resume from an earlier step supersedes."""


@dataclass(frozen=True)
class Segment:
    """One process of a run, and the signal that ends it after some optimizer steps."""

    command: tuple[str, ...]
    signal: str = ""
    after: int = 0
    exits_after_signal: bool = True
    """Whether the process exits as a shell expects after SIGINT and SIGTERM. A script that returns exits with 0."""

    @property
    def exit_code(self) -> int:
        """The exit code of the process if nothing goes wrong."""
        if not self.signal:
            return 0
        number = signal.Signals[f"SIG{self.signal}"].value
        if self.signal == "KILL":
            return -number
        return 128 + number if self.exits_after_signal else 0


@dataclass(frozen=True)
class Case:
    """A run of one or more segments in one folder."""

    name: str
    segments: tuple[Segment, ...]

    @property
    def is_killed(self) -> bool:
        return any(segment.signal == "KILL" for segment in self.segments)


def cases(examples: Path) -> Iterator[Case]:
    """Return all runs of a recording."""
    for name, words in RECIPES.items():
        command = train_command(words)
        yield Case(f"{name}.straight", (Segment(command),))
        if name not in ONLY_STRAIGHT:
            after = STOP_SELFPLAY_AFTER if name == "hex-selfplay" else STOP_AFTER
            for signal_name, suffix in (("TERM", "stopped"), ("KILL", "killed")):
                yield Case(f"{name}.{suffix}", (Segment(command, signal_name, after), Segment(command)))
    growing = ("text", "schedule=constant", "eval_every=5", "threads=1")
    grown = [Segment(train_command((*growing, f"max_steps={steps}"))) for steps in (7, 12)]
    yield Case("text.longer", tuple(grown))
    by_epoch = train_command(("hex", *TINY_HEX, "epochs=3", "threads=1", "epochs_per_session=1"))
    yield Case("hex.by-epoch", (Segment(by_epoch),) * 3)
    text = train_command(RECIPES["text"])
    yield Case("text.interrupted", (Segment(text, "INT", STOP_AFTER), Segment(text)))
    yield Case("text.supervised", (Segment(train_command(RECIPES["text"], restarts=3)),))
    yield Case("text.two-ranks", (Segment((*train_command(RECIPES["text"], restarts=3), "--nproc", "2")),))
    for file in EXAMPLES:
        command, name = (str(examples / file), "{run}"), Path(file).stem
        yield Case(f"{name}.straight", (Segment(command),))
        for signal_name, suffix in (("TERM", "stopped"), ("KILL", "killed")):
            stopped = Segment(command, signal_name, STOP_EXAMPLE_AFTER, exits_after_signal=file in EXAMPLES_WITH_EXIT)
            yield Case(f"{name}.{suffix}", (stopped, Segment(command)))
    for file in EXAMPLES_WITHOUT_RUN:
        yield Case(f"{Path(file).stem}.straight", (Segment((str(examples / file),)),))


def train_command(words: Sequence[str], *, restarts: int = 0) -> tuple[str, ...]:
    """Return the arguments of `whet train`; without restarts it trains in this process, where a signal can be timed."""
    options = ("--no-measure", "--device", "cpu", "--max-restarts", str(restarts), "--run", "{run}")
    return ("-m", "whet", "--quiet", "train", *words, *options)


def record(whet: Path, out: Path, *, examples: Path, renames: Renames, only: str, jobs: int) -> bool:
    """Run all cases and write one JSON file for each; return whether every process ended as expected."""
    out.mkdir(parents=True, exist_ok=True)
    work = out / "work"
    shutil.rmtree(work, ignore_errors=True)
    (work / "inputs").mkdir(parents=True)
    recorder = Recorder(whet.absolute() / "python", work.absolute(), renames)
    recorder.make_inputs()
    started = time.monotonic()

    def run(case: Case) -> None:
        begun = time.monotonic()
        actual = recorder.run(case)
        (out / f"{case.name}.json").write_text(json.dumps(actual, indent=1, sort_keys=True) + "\n")
        print(f"{case.name:32} exit {actual['exit_codes']}  {time.monotonic() - begun:.1f} s", flush=True)
        problems.extend(f"{case.name}: {line}" for line in unexpected_exits(actual))

    problems: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, [case for case in cases(examples.absolute()) if only in case.name]))
    print(f"{time.monotonic() - started:.0f} s in all, in {out}")
    print("\n".join(problems), end="\n" if problems else "")
    return not problems


class Recorder:
    """Runs cases with one Python in one work folder."""

    def __init__(self, python: Path, work: Path, renames: Renames) -> None:
        self._python = python
        self._work = work
        self._keys = renames.get("keys", {})
        self._kinds = renames.get("kinds", {})

    def make_inputs(self) -> None:
        """Write conversations, rows and a tiny BERT; prepare the conversations as a user would."""
        inputs = self._work / "inputs"
        things = ("tea", "pie", "soup", "milk", "rice", "beans", "corn", "salt")
        roles = ("user", "assistant", "user", "assistant")
        with (inputs / "talks.jsonl").open("w") as file:
            for number in range(4):
                for thing in things:
                    texts = (f"I want {thing}.", "Yes.", f"What? {number}", f"You want {thing}.")
                    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
                    file.write(json.dumps({"messages": turns}) + "\n")
        with (inputs / "rows.jsonl").open("w") as file:
            for number in range(90):
                label = ("fox", "fern", "flint")[number % 3]
                text = " ".join((label, *(f"word{(number * 5 + place * place) % 8}" for place in range(number % 12))))
                file.write(json.dumps({"text": text, "label": label}) + "\n")
        prepared = ("-m", "whet", "--quiet", "data", "chat", "talks.jsonl", *CHAT_OPTIONS)
        corpus = ("-m", "whet", "--quiet", "train", "text", "max_steps=1", "--no-measure", "--run", "corpus")
        for words in (prepared, corpus, (THIS_FILE, "bert", "bert")):
            with (inputs / "inputs.log").open("a") as log:
                command = [self._python, *words]
                subprocess.run(command, cwd=inputs, env=self._environment("inputs"), check=True, stdout=log, stderr=log)

    def run(self, case: Case) -> dict[str, Any]:
        """Run the segments of a case one after the other and return what they left behind."""
        folder = self._work / case.name
        folder.mkdir()
        if case.name.startswith("text"):
            # It holds the embedded texts: collecting them takes longer than the run.
            shutil.copytree(self._home("inputs"), self._home(case.name))
        places = {"{run}": str(folder / "run"), "{inputs}": str(self._work / "inputs")}
        exit_codes, weights = [], folder / "weights.json"
        for number, segment in enumerate(case.segments):
            words = [self._word(word, places) for word in segment.command]
            child = [self._python, THIS_FILE, "child", weights, segment.signal or "-", str(segment.after), *words]
            with (folder / f"segment-{number}.log").open("w") as log:
                environment = self._environment(case.name)
                done = subprocess.run(child, cwd=folder, env=environment, stdout=log, stderr=log, timeout=900)
            exit_codes.append(done.returncode)
        runs = sorted(path.parent for path in folder.rglob("events.jsonl"))
        result = {
            "exit_codes": exit_codes,
            "expected_exit_codes": [segment.exit_code for segment in case.segments],
            "weights_at_exit": json.loads(weights.read_text()) if weights.exists() else None,
            "runs": {
                str(run.relative_to(folder)): read_run(run, self._kinds, is_killed=case.is_killed) for run in runs
            },
        }
        shutil.rmtree(folder / "run", ignore_errors=True)
        return result

    def _word(self, word: str, places: Mapping[str, str]) -> str:
        key, equals, value = word.partition("=")
        if equals:
            word = f"{self._keys.get(key, key)}={value}"
        for place, path in places.items():
            word = word.replace(place, path)
        return word

    def _environment(self, name: str) -> dict[str, str]:
        settings = {"WHET_HOME": str(self._home(name)), "GOMP_SPINCOUNT": "10000", "TOKENIZERS_PARALLELISM": "false"}
        return {**os.environ, **settings}  # noqa: TID251 - whet is what is compared, so nothing here depends on it

    def _home(self, name: str) -> Path:
        """Return a WHET_HOME for each run: none finds what another one cached."""
        return self._work / "homes" / name


def child(weights: Path, signal_name: str, after: int, words: Sequence[str]) -> None:
    """Run a script or module, send this process a signal after some optimizer steps, save a hash of the weights."""
    import torch

    counts: dict[int, int] = {}
    last: list[torch.optim.Optimizer] = []

    def count(optimizer: torch.optim.Optimizer) -> None:
        # Steps that are measured before training have a learning rate of 0. The signal must arrive in training.
        if not any(float(group["lr"]) for group in optimizer.param_groups):
            return
        last[:] = [optimizer]
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        if signal_name != "-" and counts[id(optimizer)] == after:
            if signal_name == "KILL":
                time.sleep(KILL_DELAY_SECONDS)
            os.kill(os.getpid(), signal.Signals[f"SIG{signal_name}"])

    call_after_steps(count)
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            runpy.run_path(words[0], run_name="__main__")
    finally:
        if last:
            parameters = [parameter for group in last[0].param_groups for parameter in group["params"]]
            digest = hashlib.sha256()
            for parameter in parameters:
                digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            weights.write_text(json.dumps(digest.hexdigest()))


def call_after_steps(function: Callable[["Optimizer"], None]) -> None:
    """Call `function` after each step of an optimizer that is created from now on.

    A global hook of torch would do the same, but whet warns of it: a resumed run would not have it.
    """
    from torch.optim import Optimizer

    add_hooks = Optimizer.profile_hook_step

    def wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def step_and_call(optimizer: Optimizer, *args: Any, **options: Any) -> Any:
            result = step(optimizer, *args, **options)
            function(optimizer)
            return result

        return add_hooks(step_and_call)

    # torch wraps the `step` of a class with this function when the first optimizer of the class is created.
    Optimizer.profile_hook_step = staticmethod(wrapped)  # type: ignore[method-assign]


def write_bert(folder: Path) -> None:
    """Write a BERT of a few thousand weights with its tokenizer, as `save_pretrained` does."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, "fox", "fern", "flint", *(f"word{number}" for number in range(8))]
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), max_position_embeddings=24, initializer_range=0.3, **sizes
    )
    transformers.BertModel(config).save_pretrained(folder)
    engine = Tokenizer(models.WordPiece({word: n for n, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer()
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    engine.add_special_tokens(special)
    engine.save(str(folder / "tokenizer.json"))
    names = {f"{name[1:-1].lower()}_token": name for name in special}
    about = {"tokenizer_class": "BertTokenizer", "model_max_length": 24, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def read_run(run: Path, kinds: Mapping[str, str | None], *, is_killed: bool) -> dict[str, Any]:
    """Return what is compared of a run folder; `kinds` has the names of kinds that are called otherwise there."""

    def names(*given: str) -> tuple[str, ...]:
        return tuple(kinds.get(name) or name for name in given)

    events: list[dict[str, Any]] = []
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] in names("resume"):
            events = [e for e in events if e["kind"] not in names(*REPLACED) or e["step"] <= event["step"]]
        events.append(event)
    # Checkpoints are written in the background, so their events may come sooner or later. A killed run loses some.
    saved = sorted({event["step"] for event in events if event["kind"] in names("checkpoint")})
    kept = [event for event in events if event["kind"] not in names(*TIMED_KINDS, "checkpoint")]
    folders = sorted((run / "checkpoints").glob("step-*"))
    plan = json.loads((run / "plan.json").read_text()) if (run / "plan.json").exists() else {}
    return {
        "losses": [event["loss"] for event in events if event["kind"] in names("step")],
        "metrics": [without_times(event) for event in events if event["kind"] in names("eval")],
        "events": [without_times(event, also=("lost_steps",) if is_killed else ()) for event in kept],
        "checkpoints": [] if is_killed else saved,
        "plan": plan_values(plan),
        "tensors": tensor_hashes(folders[-1]) if folders else {},
    }


def without_times(value: Any, *, also: Sequence[str] = ()) -> Any:
    """Return an event without what depends on the clock, the load or the place."""
    if isinstance(value, dict):
        dropped = (*TIMED_FIELDS, *also)
        kept = {k: v for k, v in value.items() if k not in dropped and not k.endswith("_seconds")}
        return {key: without_times(inner) for key, inner in kept.items()}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def plan_values(plan: Any) -> dict[str, Any]:
    """Return the value of every setting of a plan file."""
    settings = plan.get("settings", [])
    if isinstance(settings, dict):
        settings = [{"name": name, **setting} for name, setting in settings.items()]
    return {setting["name"]: setting["value"] for setting in settings}


def tensor_hashes(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of dtype, shape and bytes of every tensor of a checkpoint."""
    hashes = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        body = memoryview(data)[8 + length :]
        for name, about in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = about["data_offsets"]
                digest = hashlib.sha256(f"{about['dtype']} {about['shape']} ".encode())
                digest.update(body[start:stop])
                hashes[name] = digest.hexdigest()
    return hashes


def compare(old: Path, new: Path, renames: Renames, *, shown: int) -> bool:
    """Print for each run what is equal, with the first differences; return whether everything is."""
    names = sorted({file.name for folder in (old, new) for file in folder.glob("*.json")})
    all_equal = True
    print(f"{'run':32} {'weights':8} {'losses':8} {'metrics':8} {'events':8} {'plan':8} {'exit':8}")
    for name in names:
        if not (old / name).exists() or not (new / name).exists():
            print(f"{name:32} only in {old if (old / name).exists() else new}")
            all_equal = False
            continue
        before, after = json.loads((old / name).read_text()), json.loads((new / name).read_text())
        columns = {title: list(differences(*pair)) for title, pair in compared(before, after, renames).items()}
        # Two runs that fail in the same way are equal, but show nothing.
        for side, recording in (("before", before), ("after", after)):
            columns["exit"] += [f"{side}: {line}" for line in unexpected_exits(recording)]
        marks = " ".join(f"{'no' if actual else 'yes':8}" for actual in columns.values())
        print(f"{name.removesuffix('.json'):32} {marks}".rstrip())
        for title, actual in columns.items():
            all_equal = all_equal and not actual
            for line in actual[:shown]:
                print(f"    {title}: {line}")
            if len(actual) > shown:
                print(f"    {title}: and {len(actual) - shown} more")
    print("all equal" if all_equal else "there are differences")
    return all_equal


def compared(before: Any, after: Any, renames: Renames) -> dict[str, tuple[Any, Any]]:
    """Return pairs of what is compared, by column; the older side is translated."""

    def pick(recording: Any, *fields: str) -> Any:
        return {name: {field: run[field] for field in fields} for name, run in recording["runs"].items()}

    def events(recording: Any, table: Renames) -> Any:
        actual = pick(recording, "events", "metrics", "checkpoints")
        return {name: {k: renamed(without_prose(v), table) for k, v in run.items()} for name, run in actual.items()}

    def weights(recording: Any, prefixes: Mapping[str, str | None]) -> Any:
        # With a run folder its checkpoint counts; the optimizer's own tensors are all there is without one.
        runs = {name: renamed_tensors(run["tensors"], prefixes) for name, run in recording["runs"].items()}
        return runs or recording["weights_at_exit"]

    def plans(recording: Any, table: Renames) -> Any:
        names = {**table, "fields": table.get("settings", {})}
        settings = {name: renamed(run["plan"], names) for name, run in recording["runs"].items()}
        return {run: {k: v for k, v in values.items() if k not in LOAD_SETTINGS} for run, values in settings.items()}

    old_events, new_events = events(before, renames), events(after, {})
    metrics = [{name: run.pop("metrics") for name, run in side.items()} for side in (old_events, new_events)]
    return {
        "weights": (weights(before, renames.get("tensors", {})), weights(after, {})),
        "losses": (pick(before, "losses"), pick(after, "losses")),
        "metrics": (metrics[0], metrics[1]),
        "events": (old_events, new_events),
        "plan": (plans(before, renames), plans(after, {})),
        "exit": (before["exit_codes"], after["exit_codes"]),
    }


def unexpected_exits(recording: Mapping[str, Any]) -> Iterator[str]:
    """Return one line for each process of a recorded run that ended with an unexpected exit code."""
    pairs = zip(recording["exit_codes"], recording["expected_exit_codes"], strict=True)
    for number, (code, expected) in enumerate(pairs):
        if code != expected:
            yield f"process {number} ended with {code}, expected {expected}"


def without_prose(value: Any) -> Any:
    """Return an event with its sentences replaced by a mark."""
    if isinstance(value, dict):
        return {key: "(text)" if key in PROSE and v is not None else without_prose(v) for key, v in value.items()}
    return [without_prose(inner) for inner in value] if isinstance(value, list) else value


def renamed(value: Any, renames: Renames) -> Any:
    """Return an event or a plan with kinds, field names and values translated."""
    kinds, fields, values = (renames.get(name, {}) for name in ("kinds", "fields", "values"))
    if isinstance(value, list):
        return [renamed(inner, renames) for inner in value if not (isinstance(inner, dict) and _is_gone(inner, kinds))]
    if not isinstance(value, dict):
        word = value if isinstance(value, str) else json.dumps(value)
        return values.get(word, value)
    result = {}
    for key, inner in value.items():
        if fields.get(key, key) is not None:
            is_kind = key == "kind" and isinstance(inner, str)
            result[fields.get(key, key)] = kinds.get(inner, inner) if is_kind else renamed(inner, renames)
    return result


def _is_gone(event: Mapping[str, Any], kinds: Mapping[str, str | None]) -> bool:
    return event.get("kind") in kinds and kinds[event["kind"]] is None


def renamed_tensors(tensors: Mapping[str, str], prefixes: Mapping[str, str | None]) -> dict[str, str]:
    """Return tensor hashes with the prefixes of their names translated."""
    result = {}
    for name, digest in tensors.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        new = "" if old is None else prefixes[old]
        if new is not None:
            result[name if old is None else new + name.removeprefix(old)] = digest
    return result


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Return one line for each difference between two JSON values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            if key not in after:
                yield f"{place}/{key} only before: {str(before[key])[:100]}"
            elif key not in before:
                yield f"{place}/{key} only after: {str(after[key])[:100]}"
            else:
                yield from differences(before[key], after[key], f"{place}/{key}")
    elif isinstance(before, list) and isinstance(after, list):
        if len(before) != len(after):
            yield f"{place} has {len(before)} entries before, {len(after)} after"
        for number, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from differences(one, other, f"{place}[{number}]")
    elif before != after:
        yield f"{place}: {str(before)[:100]} -> {str(after)[:100]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run everything and write a recording")
    recording.add_argument("--whet", type=Path, required=True, help="the bin folder of a virtual environment")
    recording.add_argument("--out", type=Path, required=True)
    recording.add_argument("--examples", type=Path, help="default: examples/ beside the virtual environment")
    recording.add_argument("--renames", type=Path, help="JSON; its `keys` translate options")
    recording.add_argument("--only", default="", help="runs whose name contains this")
    recording.add_argument("--jobs", type=int, default=2)
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--renames", type=Path)
    comparing.add_argument("--shown", type=int, default=5, help="differences to show for each run and column")
    # What `record` starts: one process of a run, and the model of two of them.
    if sys.argv[1:2] == ["child"]:
        child(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:])
        return 0
    if sys.argv[1:2] == ["bert"]:
        write_bert(Path(sys.argv[2]))
        return 0
    given = parser.parse_args()
    renames: Renames = json.loads(given.renames.read_text()) if given.renames else {}
    if given.command == "compare":
        return 0 if compare(given.old, given.new, renames, shown=given.shown) else 1
    examples = given.examples or given.whet.absolute().parent.parent / "examples"
    is_as_expected = record(given.whet, given.out, examples=examples, renames=renames, only=given.only, jobs=given.jobs)
    return 0 if is_as_expected else 1


if __name__ == "__main__":
    sys.exit(main())
