"""Makes one operator of the virtual Mac wrong after the other (simulated), runs `whet compare` and prints JSON.

The arguments are a folder for the reproducers, each of which is run here with the fault and without, and which faults:
"factor", "some factors" (every fifth, and those whose place is looked at) or "condition".
"""

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as f

from whet.device import virtual_mac

virtual_mac.install("m2-air-8gb")

from whet.api.verify import model_spec  # noqa: E402
from whet.device.virtual_mac import Miscompute, simulate  # noqa: E402
from whet.verify.parity.compare import compare_devices  # noqa: E402


class Reader(nn.Module):
    """A small transformer with gates, whose attention is written out; the head is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.mix, self.wide, self.narrow = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 5))

    def forward(self, tokens):
        x = self.tokens(tokens)
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
        x = x + self.narrow(f.gelu(self.wide(x)))
        return self.head(x * torch.sigmoid(x)).mean(1)


def read_loss(model, tokens, labels):
    return f.cross_entropy(model(tokens), labels)


def seer() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 6), nn.Softplus(), nn.Linear(6, 4), nn.LeakyReLU(),
    )  # fmt: skip


def see_loss(model, images, wanted):
    return f.mse_loss(model(images), wanted)


def subjects():
    torch.manual_seed(0)
    reading = (torch.randint(0, 20, (6, 7)), torch.randint(0, 5, (6,)))
    seeing = (torch.randn(6, 3, 8, 8), torch.randn(6, 4))
    reader = Reader()
    STARTED["reader"] = reader.head[2].bias.detach().clone()
    return {"reader": model_spec(reader, reading, read_loss), "seer": model_spec(seer(), seeing, see_loss)}


FAULTS = {
    "reader": (
        "mm", "addmm", "bmm", "tanh", "tanh_backward", "gelu", "gelu_backward", "native_layer_norm",
        "native_layer_norm_backward", "_softmax", "_softmax_backward_data", "_log_softmax",
        "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "index_select",
        "embedding_dense_backward", "sigmoid", "sigmoid_backward", "mul", "add", "mean", "sum", "_fused_adamw_",
    ),
    "seer": (
        "convolution", "convolution_backward", "native_batch_norm", "native_batch_norm_backward",
        "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "threshold_backward", "silu", "silu_backward",
        "softplus", "softplus_backward", "leaky_relu", "leaky_relu_backward", "mse_loss", "mse_loss_backward",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    ),
}  # fmt: skip


LOOKED_AT = ("tanh_backward", "native_layer_norm_backward", "gelu_backward", "convolution_backward", "_fused_adamw_")


def exit_code(program: Path) -> int | str:
    """The exit code of the program, run in this process, where the virtual Mac is installed."""
    kept, sys.argv = sys.argv, [str(program)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(program), run_name="__main__")
    except SystemExit as error:
        return error.code
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sys.argv = kept
    return "did not end by itself"


def changed_since_the_start(bias: torch.Tensor, *_: torch.Tensor) -> bool:
    """True from the second step on, for the last layer."""
    return bias.shape == (5,) and not torch.equal(bias.cpu(), STARTED["reader"])


STARTED: dict[str, torch.Tensor] = {}
WRONG_RESULTS = {
    "small error": ("reader", Miscompute("gelu_backward", 1e-3), "aten::gelu_backward"),
    "strided factor": ("reader", Miscompute("mm", when=lambda a, b: not a.is_contiguous()), "aten::mm"),
    "many terms": ("reader", Miscompute("mm", when=virtual_mac.reduces_over(40)), "aten::mm"),
    "wide result": ("reader", Miscompute("addmm", when=lambda _, a, b: b.shape[1] == 16), "aten::addmm"),
    "expanded input": ("reader", Miscompute("div", when=lambda a, *_: 0 in a.stride()), "aten::div"),
    "later step": ("reader", Miscompute("addmm", 5.0, when=changed_since_the_start), "aten::addmm"),
}


def factor_faults(*, only_some: bool):
    for name, operators in FAULTS.items():
        for number, operator in enumerate(operators):
            if only_some and number % 5 and operator not in LOOKED_AT:
                continue
            yield name, operator, Miscompute(operator), f"aten::{operator}"


def condition_faults():
    for label, (name, fault, expected) in WRONG_RESULTS.items():
        yield name, label, fault, expected


def ask(subject, fault, program: Path, expected: str, **options) -> dict:
    """Return the findings of compare with a fault, and the output of its program with and without it."""
    with simulate(fault):
        wrong = compare_devices(subject, out=program, **options)
        with_fault = exit_code(program) if program.exists() else "not written"
    located = wrong.located
    culprit = located.culprit if located else None
    return {
        "agrees": wrong.agrees,
        "expected": expected,
        "named": culprit and culprit.operator,
        "module": culprit and culprit.module,
        "line": culprit and culprit.line,
        "phase": culprit and culprit.phase,
        "step": culprit and culprit.step,
        "all": located and list(located.wrong),
        "with_fault": with_fault,
        "without_fault": exit_code(program) if program.exists() else "not written",
    }


def main(folder: Path, which: str) -> None:
    options = {"devices": ["cpu", "mps"], "steps": 2, "precisions": []}
    made, result = subjects(), {}
    for name, subject in made.items():
        sound = compare_devices(subject, **options)
        result[name] = {"agrees": sound.agrees, "rows": {row.what: row.error for row in sound.rows}}
    faults = condition_faults() if which == "condition" else factor_faults(only_some=which == "some factors")
    for name, label, fault, expected in faults:
        program = folder / f"{name}_{label}.py".replace(" ", "_")
        result[f"{name} {label}"] = ask(made[name], fault, program, expected, **options)
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
