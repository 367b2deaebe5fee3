"""Kill and resume trainings with public optimizers and public models, and compare every bit with an uninterrupted run.

    python benchmarks/resumes.py [--only optimizers|models] [--steps 12] [--virtual-mac m2-air-8gb] [--markdown FILE]

Optimizers come from torch and from packages that are installed (pytorch_optimizer, lion_pytorch, schedulefree,
prodigyopt, bitsandbytes); Transformers models, by configuration. Each training runs once to its end. A second one
is killed with SIGKILL after a random step and resumed by the same call. Weights, buffers and optimizer state are
compared. With --virtual-mac, everything runs on a simulated Mac.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import whet
from whet.run.events import read_events

SAMPLES, BATCH = 24, 4
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

# --- optimizers -------------------------------------------------------------------------------------------------------

TORCH_OPTIMIZERS = (
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
)  # fmt: skip
OTHER_OPTIMIZERS = (
    "lion_pytorch.Lion", "schedulefree.AdamWScheduleFree", "prodigyopt.Prodigy", "bitsandbytes.optim.AdamW8bit",
    "pytorch_optimizer.AdaBelief", "pytorch_optimizer.Lamb", "pytorch_optimizer.SOAP", "pytorch_optimizer.Adan",
    "pytorch_optimizer.ADOPT", "pytorch_optimizer.StableAdamW", "pytorch_optimizer.Ranger",
    "pytorch_optimizer.DAdaptAdam", "pytorch_optimizer.Lookahead",
)  # fmt: skip


def optimizer_cases() -> dict[str, MakeOptimizer]:
    """Return all optimizers that can be imported here."""
    cases: dict[str, MakeOptimizer] = {}
    for name in TORCH_OPTIMIZERS:
        momentum = {"momentum": 0.9} if name == "SGD" else {}
        cases[f"torch {name}"] = lambda m, n=name, o=momentum: getattr(torch.optim, n)(m.parameters(), lr=0.01, **o)
    if hasattr(torch.optim, "Muon"):
        cases["torch Muon"] = lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01)
    cases["torch SparseAdam"] = lambda m: torch.optim.SparseAdam(m.embedding.parameters(), lr=0.01)
    for path in OTHER_OPTIMIZERS:
        module, _, name = path.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            print(f"left out: {path}: {error}", file=sys.stderr)
            continue
        if name == "Lookahead":
            cases[path] = lambda m, k=kind: k(torch.optim.AdamW(m.parameters(), lr=0.01), k=3)
        else:
            cases[path] = lambda m, k=kind: k(m.parameters(), lr=0.01)
    return cases


class Classifier(nn.Module):
    """A small model with an embedding, a norm and dropout."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16, sparse=is_sparse)
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.embedding(ids).mean(1))


def optimizer_training(name: str, make: MakeOptimizer) -> tuple[nn.Module, Any, Any, Any]:
    model = Classifier(is_sparse="Sparse" in name)
    data = torch.randint(0, 40, (SAMPLES, 6)), torch.randint(0, 5, (SAMPLES,))
    return model, data, functional.cross_entropy, make(model)


# --- models -----------------------------------------------------------------------------------------------------------

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {**_SMALL, **_TOKENS, "max_position_embeddings": 32}
_KV = {**_TEXT, "num_key_value_heads": 1, "head_dim": 16}
_IMAGE = {**_SMALL, "image_size": 16, "patch_size": 8, "num_labels": 5}
_SEQUENCE = {**_TOKENS, "decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2": ("lm", "GPT2LMHeadModel", {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "GPT-NeoX": ("lm", "GPTNeoXForCausalLM", _TEXT),
    "OPT": ("lm", "OPTForCausalLM", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "BLOOM": ("lm", "BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "Llama": ("lm", "LlamaForCausalLM", _KV),
    "Mistral": ("lm", "MistralForCausalLM", _KV),
    "Qwen2": ("lm", "Qwen2ForCausalLM", _KV),
    "Gemma": ("lm", "GemmaForCausalLM", _KV),
    "Phi": ("lm", "PhiForCausalLM", _TEXT),
    "Mamba": ("lm", "MambaForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "BERT": ("class", "BertForSequenceClassification", {**_TEXT, "num_labels": 5}),
    "RoBERTa": ("class", "RobertaForSequenceClassification", {**_TEXT, "num_labels": 5}),
    "ALBERT": ("class", "AlbertForSequenceClassification", {**_TEXT, "embedding_size": 16, "num_labels": 5}),
    "ELECTRA": ("class", "ElectraForSequenceClassification", {**_TEXT, "embedding_size": 16, "num_labels": 5}),
    "DistilBERT": (
        "class",
        "DistilBertForSequenceClassification",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "num_labels": 5},
    ),
    "T5": (
        "lm",
        "T5ForConditionalGeneration",
        {**_SEQUENCE, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    ),
    "BART": (
        "lm",
        "BartForConditionalGeneration",
        {**_SEQUENCE, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32},
    ),
    "ViT": ("image", "ViTForImageClassification", _IMAGE),
    "DeiT": ("image", "DeiTForImageClassification", _IMAGE),
    "ConvNeXt": (
        "image",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "num_labels": 5},
    ),
    "ResNet": (
        "image",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5},
    ),
    "Swin": (
        "image",
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4,
         "num_labels": 5},
    ),
}  # fmt: skip


def model_training(kind: str, name: str, options: dict[str, Any]) -> tuple[nn.Module, Any, Any, Any]:
    import transformers

    cls = getattr(transformers, name)
    model = cls(cls.config_class(**options))
    if kind == "image":
        data = {"pixel_values": torch.randn(SAMPLES, 3, 16, 16), "labels": torch.randint(0, 5, (SAMPLES,))}
    else:
        ids = torch.randint(3, 64, (SAMPLES, 8))
        data = {"input_ids": ids, "labels": ids if kind == "lm" else torch.randint(0, 5, (SAMPLES,))}
    return model, data, lambda batch: model(**batch), torch.optim.AdamW(model.parameters(), lr=1e-3)


# --- runs -------------------------------------------------------------------------------------------------------------


class KillAfter(whet.Callback):
    """Kills this process after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, state: whet.State, outcome: Any) -> None:
        del outcome
        if state.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return a hash of every tensor and of the optimizer's state."""
    found = {name: _hash(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return {**found, "optimizer": _hash(optimizer.state_dict())}


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        dense = value.detach().to_dense() if value.is_sparse else value.detach()
        flat = dense.cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    if isinstance(value, dict):
        return [(repr(key), _plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # Functions and objects have an address in their text.
    return value if isinstance(value, int | float | str | None) else type(value).__name__


def train_in_child(
    make: Callable[[], tuple[nn.Module, Any, Any, Any]], run: Path, *, steps: int, kill_at: int, device: str
) -> tuple[int, dict[str, Any]]:
    """Train in a fork of this process. Return its exit code and what it wrote."""
    out = run.with_suffix(".json")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.manual_seed(0)
            model, data, loss, optimizer = make()
            if hasattr(optimizer, "train"):
                # Schedule-free optimizers switch between the weights of training and those of evaluation.
                optimizer.train()
            whet.train(
                model, data, loss=loss, optimizer=optimizer, global_batch_size=BATCH, epochs=99, max_steps=steps,
                run=run, device=device, measure=False, split_batch=False, on_event=None, callbacks=[KillAfter(kill_at)],
                overrides={"threads": 1, "checkpoint_steps": 3, "deterministic": "on" if device == "cuda" else "off"},
            )  # fmt: skip
            out.write_text(json.dumps(digest(model, optimizer)))
            code = 0
        except BaseException:
            out.write_text(json.dumps({"error": " ".join(traceback.format_exc().strip().splitlines()[-3:])}))
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), json.loads(out.read_text()) if out.exists() else {}


def examine(name: str, make: Callable[[], Any], folder: Path, *, steps: int, device: str) -> tuple[str, str]:
    """Return the result of one case and what the resume claimed."""
    kill_at = random.Random(name).randint(4, steps - 1)
    code, whole = train_in_child(make, folder / "whole", steps=steps, kill_at=0, device=device)
    if code != 0:
        return f"does not train: {whole.get('error', code)}"[:400], ""
    code, _ = train_in_child(make, folder / "killed", steps=steps, kill_at=kill_at, device=device)
    assert code == -signal.SIGKILL, code
    code, resumed = train_in_child(make, folder / "killed", steps=steps, kill_at=0, device=device)
    if code != 0:
        return f"DOES NOT RESUME: {resumed.get('error', code)}"[:400], ""
    claim = str([*read_events(folder / "killed", kinds=("resume",))][-1].get("exactness"))
    different = [part for part in whole if whole[part] != resumed.get(part)]
    result = f"DIFFERENT: {', '.join(different)[:100]}" if different else f"equal (killed at {kill_at})"
    return result, claim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("optimizers", "models"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--first", type=int, help="only so many optimizers, and so many models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--virtual-mac")
    parser.add_argument("--markdown", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = given.device
    if given.virtual_mac:
        from whet.device import virtual_mac

        virtual_mac.install(given.virtual_mac)
        device = "mps"
    cases: dict[str, Callable[[], Any]] = {}
    if given.only != "models":
        optimizers = list(optimizer_cases().items())[: given.first]
        cases |= {n: lambda n=n, make=make: optimizer_training(n, make) for n, make in optimizers}
    if given.only != "optimizers":
        import transformers

        models = list(MODELS.items())[: given.first]
        for _, (_, name, _) in models:
            # Imported here, so that each process does not import it again.
            getattr(transformers, name)
        cases |= {n: lambda one=one: model_training(*one) for n, one in models}
    lines = ["| training | result | the resume said |", "| --- | --- | --- |"]
    bad = untrained = 0
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, make) in enumerate(cases.items()):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            result, claim = examine(name, make, folder, steps=given.steps, device=device)
            is_bad = result.startswith("DOES") or (result.startswith("DIFF") and "not bit-exact" not in claim)
            untrained += result.startswith("does not train")
            bad += is_bad
            lines.append(f"| {name} | {result} | {claim} |")
            print(lines[-1], flush=True)
    where = f"virtual {given.virtual_mac} (simulated)" if given.virtual_mac else device
    counts = f"{bad} called exact and different, or not restored; {untrained} did not train"
    summary = f"{len(cases)} trainings on {where}: {counts}"
    print(summary)
    if given.markdown:
        given.markdown.write_text("\n".join([*lines, "", summary, ""]))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
