"""whet's MPS device on the virtual Mac (simulated): errors with fixes, a GPU that fails silently, fallbacks,
layouts and copies. Every case is a separate process."""

import ast
import os
from pathlib import Path

import pytest

import whet
from virtual_process import INSTALL
from whet.machine.known import load_machine
from whet.report.text import render_text
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

START = (
    INSTALL
    + """
import os, sys, torch, whet
from torch import nn
torch.manual_seed(0)

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def data(num=64):
    x = torch.randn(num, 8, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)

def fit(model, data, loss=None, optimizer=None, **options):
    def plain(micro):
        return ((model(micro.x) - micro.y) ** 2).mean()
    options = {"global_batch_size": 16, "device": "mps", "on_event": None, **options}
    optimizer = optimizer or whet.OptimizerChoice(lr=1e-2)
    try:
        return whet.train(model, data, loss=loss or plain, optimizer=optimizer, **options)
    except whet.WhetError as error:
        print(error)
        sys.exit(error.exit_code)
"""
)
HIGH, LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"


def events(run: Path, kind: str) -> list:
    return list(read_events(open_run(run), kinds=(kind,)))


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reported", "got"),
    [
        ({HIGH: "0.9"}, "MPS needs both watermarks, or none", f"{HIGH}=0.9 alone"),
        ({HIGH: "3"}, f"{HIGH} must be a number from 0 to 2", "'3'"),
        ({HIGH: "high"}, f"{HIGH} must be a number from 0 to 2", "'high'"),
        ({HIGH: "1.0", LOW: "1.2"}, "MPS's low watermark must not be above the high one", f"{LOW}=1.2, {HIGH}=1"),
    ],
)
def test_watermarks_that_mps_would_die_of_are_refused_before(python, changes: dict, reported: str, got: str) -> None:
    done = python(START + "fit(net(), data())", **changes)
    assert done.returncode == 2, done.stderr
    what, got_line, try_line = done.stdout.splitlines()
    assert what == reported
    assert got in got_line
    assert f"export {HIGH}=1.0 {LOW}=0.9, or unset both" in try_line


def test_a_removed_limit_is_one_line_and_no_error(python, tmp_path: Path) -> None:
    done = python(START + "fit(net(), data(), run='run', on_event='line')", **{HIGH: "0.0"})
    assert done.returncode == 0, done.stdout
    assert done.stderr.count("a high watermark of 0 removes the limit of GPU memory") == 1
    assert any("removes the limit" in str(event.get("message")) for event in events(tmp_path / "run", "plan"))


def test_the_plan_shows_the_variables_that_are_in_force(python, tmp_path: Path) -> None:
    code = START + "fit(net(), data(), run='run')"
    done = python(code, **{HIGH: "0.8", LOW: "0.7", "PYTORCH_ENABLE_MPS_FALLBACK": "1"})
    assert done.returncode == 0, done.stderr
    settings = whet.open_run(tmp_path / "run").plan["settings"]
    shown = {name: settings[name]["value"] for name, setting in settings.items() if setting["source"] == "environment"}
    shown.pop("threads", None)
    assert shown == {"mps_fallback": "on", "high_watermark": 0.8, "low_watermark": 0.7}
    refused = python(START + "fit(net(), data(), overrides={'high_watermark': 0.5})")
    assert refused.returncode != 0
    assert "torch has read other watermarks of MPS than those of the plan" in refused.stdout + refused.stderr


def test_watermarks_are_set_before_the_memory_of_the_device_is_read(python) -> None:
    """On a real Mac the library asks torch for the limit first; then MPS has read the variables."""
    code = (
        "from whet.device import open as opening\n"
        "import os, torch\n"
        "opening.mps_unavailable_reason = lambda: None\n"
        "torch.backends.mps.get_core_count = lambda: 8\n"
        f"torch.mps.recommended_max_memory = lambda: print(os.environ[{HIGH!r}], os.environ[{LOW!r}]) or 1\n"
        "opening.current_machine()\n"
    )
    assert python(code).stdout == "1.0 0.9\n"


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "got", "cure"),
    [
        (
            "x, y = data(); fit(net(), {'x': x, 'y': y.double()})",
            "the data's field 'y' is torch.float64",
            ".to(torch.float32)",
        ),
        (
            "x, y = data(); fit(net(), (x, y.double()), overrides={'data_location': 'host'})",
            "field 'y'",
            ".to(torch.float32)",
        ),
        (
            "rows = [(row, torch.tensor(1.0, dtype=torch.float64)) for row in data()[0]]\nfit(net(), rows)",
            "the data's field 'y' is torch.float64",
            "dtype=torch.float32 where it is created",
        ),
        (
            "model = net(); model[2].double(); fit(model, data())",
            "parameter '2.weight' is torch.float64",
            "model.float()",
        ),
        (
            "model = net(); model.register_buffer('scale', torch.ones(3, dtype=torch.float64)); fit(model, data())",
            "buffer 'scale' is torch.float64, of shape (3,)",
            "model.float()",
        ),
    ],
    ids=["column", "column on the host", "number in a sample", "parameter", "buffer"],
)
def test_float64_is_named(python, code: str, got: str, cure: str) -> None:
    done = python(START + code)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("MPS has no float64\n")
    assert got in done.stdout
    assert cure in done.stdout


def test_float64_inside_the_loss_is_reported_with_its_line(python, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(model, micro):\n    return model(micro.x).double().mean()\n")
    done = python(
        "import sys; sys.path.insert(0, '.')\n"
        + START
        + "import mine; m = net(); fit(m, data(), loss=lambda micro: mine.loss(m, micro))"
    )
    assert done.returncode == 1, done.stderr
    assert "MPS has no float64\n  got: mine.py:2 in loss(): return model(micro.x).double().mean()" in done.stdout
    assert "try: .float()" in done.stdout


def test_a_missing_operator_is_reported_with_its_line_and_fixes(python, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\nclass Model(torch.nn.Linear):\n    def forward(self, x):\n"
        "        y = super().forward(x)\n        return torch.pdist(y)\n"
    )
    done = python(
        "import sys; sys.path.insert(0, '.')\n" + START + "import mine; m = mine.Model(8, 4)\n"
        "fit(m, data(), loss=lambda micro: m(micro.x).sum())"
    )
    assert done.returncode == 1, done.stderr
    what, got, cure = done.stdout.splitlines()
    assert what == "MPS has no operator aten::_pdist_forward"
    assert got == "  got: mine.py:7 in forward(): return torch.pdist(y)"
    assert all(choice in cure for choice in ("mps_fallback=on", "--device cpu", "another operator"))


def test_an_operator_missing_in_the_backward_pass_is_reported(python) -> None:
    # torch 2.15 has this operator, and every other one that a backward pass alone needs.
    gap = (
        "from whet.device.virtual_mac import installation\n"
        "kernels = installation.mps_kernels\n"
        "installation.mps_kernels = lambda listed: [\n"
        "    kernel for kernel in kernels(listed) if not kernel.name.startswith('_upsample_bilinear2d_aa_backward')\n"
        "]\n"
    )
    code = (
        "m = nn.Conv2d(1, 1, 3)\n"
        "def loss(micro):\n"
        "    return nn.functional.interpolate(m(micro), 3, mode='bilinear', antialias=True).mean()\n"
        "fit(m, torch.randn(32, 1, 8, 8), loss=loss)"
    )
    done = python(gap + START + code)
    assert done.returncode == 1, done.stderr
    assert "MPS has no operator aten::_upsample_bilinear2d_aa_backward" in done.stdout
    assert "in the backward pass" in done.stdout


def test_an_operator_missing_in_an_evaluation_is_reported(python) -> None:
    code = (
        "def evaluate(model, micros):\n"
        "    return {'rank': sum(torch.pdist(m.x).sum() for m in micros)}\n"
        "fit(net(), data(), evaluate=evaluate, val=data())"
    )
    done = python(START + code)
    assert done.returncode == 1, done.stderr
    assert "MPS has no operator aten::_pdist_forward" in done.stdout


def test_other_errors_stay_as_they_are(python) -> None:
    done = python(START + "def loss(micro): raise NotImplementedError('mine')\nfit(net(), data(), loss=loss)")
    assert done.returncode == 1
    assert "NotImplementedError: mine" in done.stderr


# --- a GPU that fails without an error -------------------------------------------------------------------------------

METAL = "Error: command buffer exited with error status.\\n\\tInsufficient Memory (00000008)\\n"
FAILING = (
    # As up to torch 2.14, which does not look at the status of a command buffer.
    "from whet.device import mps; mps.torch_release = lambda: (2, 14)\n"
    "model, calls = net(), []\n"
    "def loss(micro):\n"
    "    calls.append(1)\n"
    f"    if len(calls) == FAIL_AT: os.write(2, b'{METAL}')\n"
    "    return ((model(micro.x) - micro.y) ** 2).mean()\n"
    # Calls are steps here: nothing else calls the loss.
    "overrides = {'checkpoint_steps': 1, 'micro_batch': 16, 'verify': 'off'}\n"
    "fit(model, data(), loss=loss, epochs=3, run='run', overrides=overrides)\n"
)


def test_a_simulated_failure_of_the_gpu_stops_the_run_before_it_is_saved(python, tmp_path: Path) -> None:
    done = python(START + FAILING.replace("FAIL_AT", "5"))
    assert done.returncode == 1, done.stderr
    assert "the GPU ran out of memory, and its results since then are invalid" in done.stdout
    assert "Insufficient Memory" in done.stderr, "Metal's own words pass through"
    run = tmp_path / "run"
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved[-1] == "step-000000004", "step 5 was computed by a GPU that had failed"
    assert events(run, "end")[-1].get("state") == "failed"
    again = python(START + FAILING.replace("FAIL_AT", "-1"))
    assert again.returncode == 0, again.stdout + again.stderr
    assert max(event.step for event in events(run, "step")) == 12


PLANTED = (
    "from whet.device.virtual_mac import DriverGrowth, GpuFailure, simulate\n"
    "model, calls = net(), []\n"
    "def loss(micro):\n"
    "    calls.append(1)\n"
    "    if len(calls) == 5: simulate(FAULT)\n"
    "    return ((model(micro.x) - micro.y) ** 2).mean()\n"
    "overrides = {'checkpoint_steps': 1, 'micro_batch': 16, 'verify': 'off'}\n"
    "fit(model, data(), loss=loss, epochs=3, run='run', overrides=overrides)\n"
)


@pytest.mark.parametrize("raises", [False, True], ids=["torch 2.14", "torch 2.15"])
def test_a_simulated_watchdog_is_answered_with_what_helps(python, tmp_path: Path, raises: bool) -> None:
    version = f"from whet.device import mps; mps.torch_release = lambda: (2, {15 if raises else 14})\n"
    done = python(START + version + PLANTED.replace("FAULT", f"GpuFailure(cause='watchdog', raises={raises})"))
    assert done.returncode == 1, done.stderr
    assert "macOS stopped the GPU's work because the display had to wait for it" in done.stdout
    assert "a display that sleeps, or SSH" in done.stdout
    assert "micro_batch" not in done.stdout, "smaller batches do not help"
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved[-1] == "step-000000004", "step 5 was computed by a GPU that had failed"
    assert "the display had to wait" in str(events(tmp_path / "run", "end")[-1].get("reason"))


def test_a_simulated_command_buffer_error_of_torch_2_15_is_memory_that_ran_out(python, tmp_path: Path) -> None:
    """Reported late, so that the run goes back to its last checkpoint; the second time with a smaller micro-batch."""
    code = "from whet.device import mps; mps.torch_release = lambda: (2, 15)\n" + PLANTED.replace(
        "FAULT", "GpuFailure('addmm', raises=True)"
    ).replace("    return ((model", "    if len(calls) >= 5: model(micro.x).sum().item()\n    return ((model")
    done = python(START + code)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    (oom,) = events(run, "oom")
    assert "MPS command buffer execution failed: Insufficient Memory" in oom.get("reason")
    assert any("the GPU ran out of memory at step 5 or before" in str(e.fields) for e in events(run, "resume"))
    assert max(event.step for event in events(run, "step")) == 12


def test_driver_memory_that_grows_tenfold_in_simulation_is_returned_within_a_few_steps(python, tmp_path: Path) -> None:
    code = PLANTED.replace("FAULT", "DriverGrowth(2**29)") + ("print(torch.mps.driver_allocated_memory() < 2**33)\n")
    done = python(START + code)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [event for event in events(tmp_path / "run", "warning") if "the GPU's driver held " in event.get("reason")]
    first = said[0]
    assert first.step <= 8, "it began in step 5"
    assert "its cache was emptied in " in first.get("reason")
    assert "and the next step took " in first.get("reason")
    assert done.stdout.splitlines()[-1] == "True"


def test_steady_memory_is_left_alone(python, tmp_path: Path) -> None:
    done = python(START + "fit(net(), data(), epochs=3, run='run')")
    assert done.returncode == 0, done.stderr
    assert not events(tmp_path / "run", "warning")


def test_many_shapes_of_the_users_own_data_are_counted_and_fewer_advised(python, tmp_path: Path) -> None:
    code = (
        "from whet.training.callbacks import device_cache\n"
        "rows = [(torch.randn(3 + n // 4, 4), torch.randn(1)) for n in range(4 * 70)]\n"
        "model = nn.Linear(4, 1)\n"
        "loader = torch.utils.data.DataLoader(rows, batch_size=4)\n"
        "whet.train(model, loader, loss=lambda b: ((model(b[0]).mean(1) - b[1]) ** 2).mean(), run='run',\n"
        "    device='mps', on_event=None, overrides={'verify': 'off'},\n"
        "    optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))\n"
    )
    done = python(START + code)
    assert done.returncode == 0, done.stdout + done.stderr
    (advice,) = events(tmp_path / "run", "warning")
    assert "64 shapes of micro-batches in 64 steps" in advice.get("reason")
    assert "pad to few lengths" in advice.get("reason")


# --- CPU fallbacks ---------------------------------------------------------------------------------------------------


def test_cpu_fallbacks_are_listed_with_their_cost_and_torchs_warning_is_not_repeated(python, tmp_path: Path) -> None:
    code = (
        "model = net()\n"
        "def loss(micro):\n"
        "    out = model(micro.x)\n"
        "    first = torch.mode(out, 0).values\n"
        "    return torch.pdist(out).sum() + first.sum()\n"
        "overrides = {'mps_fallback': 'on', 'micro_batch': 8}\n"
        "fit(model, data(), loss=loss, epochs=3, run='run', on_event='line', overrides=overrides, split_batch=True)\n"
        "print(sorted(virtual_mac.stats().fallbacks))\n"
    )
    done = python(START + code, PYTORCH_ENABLE_MPS_FALLBACK="1")
    assert done.returncode == 0, done.stderr
    assert "will fall back" not in done.stderr
    (logged,) = events(tmp_path / "run", "fallback")
    operators = logged.get("operators")
    counted = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    # The functional form and the in-place or out= form that it ends in are one operator here.
    assert {name.removeprefix("aten::").partition(".")[0].removesuffix("_") for name in operators} == {
        name.partition(".")[0].removesuffix("_") for name in counted
    }, "the same as the virtual Mac itself has counted"
    # Two micro-batches in each step.
    assert operators["aten::_pdist_forward"]["calls"] == 2
    assert all(cost["seconds"] > 0 for cost in operators.values())
    assert "fell back to the CPU: " in done.stderr
    report = render_text(whet.summarize(tmp_path / "run"))
    assert "fell back to the CPU: " in report
    assert " ms a step" in report


def test_a_model_without_fallbacks_reports_nothing(python, tmp_path: Path) -> None:
    code = "fit(net(), data(), run='run', overrides={'mps_fallback': 'on'})"
    done = python(START + code, PYTORCH_ENABLE_MPS_FALLBACK="1")
    assert done.returncode == 0, done.stderr
    assert not events(tmp_path / "run", "fallback")


# --- memory, layouts, copies, scaling --------------------------------------------------------------------------------


def test_peak_memory_is_counted_or_sampled(python) -> None:
    code = (
        "from whet.device import mps\n"
        "for release in ((2, 13), (2, 12)):\n"
        "    mps.torch_release = lambda: release\n"
        "    device = mps.MpsDevice()\n"
        "    big = torch.zeros(64 * 2**20, dtype=torch.uint8, device='mps'); device.mark(); del big\n"
        "    memory = device.memory.usage()\n"
        "    print(memory.peak >= 64 * 2**20, memory.allocated < 2**20, memory.limit)\n"
    )
    done = python(START + code)
    gpu = load_machine("m2-air-8gb").accelerator("mps")
    assert gpu is not None
    assert done.stdout.splitlines() == [f"True True {gpu.usable_bytes}"] * 2, done.stderr


def test_weights_become_contiguous_and_stay_the_same_objects(python) -> None:
    code = (
        "model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))\n"
        "model.to(memory_format=torch.channels_last)\n"
        "model[2].weight.data = torch.randn(16, 1).t()\n"
        "kept = dict(model.named_parameters()); values = {n: p.detach().clone() for n, p in kept.items()}\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "assert not model[0].weight.is_contiguous()\n"
        "class Stop(Exception): pass\n"
        "def loss(micro):\n"
        "    now = dict(model.named_parameters())\n"
        "    print(all(now[n] is p for n, p in kept.items()), all(p.is_contiguous() for p in now.values()),\n"
        "          all(torch.equal(now[n].cpu(), v) for n, v in values.items()), next(iter(now.values())).device)\n"
        "    raise Stop\n"
        "try: fit(model, torch.randn(32, 3, 4, 4), loss=loss, optimizer=optimizer)\n"
        "except Stop: pass\n"
    )
    done = python(START + code)
    # The loss is called for the checks before the first step, too.
    assert {*done.stdout.splitlines()} == {"True True True mps:0"}, done.stdout + done.stderr


def test_weights_that_share_memory_still_do(python) -> None:
    code = (
        "from whet.device.mps import make_contiguous\n"
        "base = torch.randn(4, 3, device='mps')\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.a = nn.Parameter(base); self.b = nn.Parameter(base.t())\n"
        "model = Tied(); make_contiguous(model)\n"
        "print(model.a.untyped_storage().data_ptr() == model.b.untyped_storage().data_ptr())\n"
    )
    assert python(START + code).stdout == "True\n"


def test_a_copy_to_the_host_is_contiguous_and_complete(python) -> None:
    code = (
        "from whet.checkpoint.encoding import encode_tensors\n"
        "wide = torch.arange(24., device='mps').reshape(4, 6)\n"
        "for view in (wide, wide[:, ::2], wide.t(), wide[1:, 2:4]):\n"
        "    copy = b''.join(bytes(piece) for piece in encode_tensors({'x': view}))\n"
        "    assert copy.endswith(view.cpu().contiguous().numpy().tobytes())\n"
        "print('all')\n"
    )
    assert python(START + code).stdout == "all\n"


@pytest.mark.parametrize(
    ("release", "optimizer", "half", "reported"),
    [
        ((2, 12), "torch.optim.AdamW(m.parameters(), fused=True)", False, "a fused optimizer ignores the loss scale"),
        ((2, 12), "torch.optim.AdamW(m.parameters())", True, "loss scaling sets half gradients to zero"),
        ((2, 12), "torch.optim.AdamW(m.parameters())", False, None),
        ((2, 13), "torch.optim.AdamW(m.parameters(), fused=True)", False, None),
    ],
)
def test_loss_scaling_is_refused_where_torch_gets_it_wrong(python, release, optimizer, half, reported) -> None:
    """With a simulated torch version; the virtual Mac itself is correct."""
    code = (
        f"from whet.device import mps; mps.torch_release = lambda: {release}\n"
        f"m = net(){'.bfloat16()' if half else ''}\n"
        "overrides = {'precision': 'fp16', 'optimizer_kernels': 'yours'}\n"
        f"result = fit(m, data(), optimizer={optimizer}, overrides=overrides)\n"
        "print(result.state, all(p.isfinite().all() for p in m.parameters()))\n"
    )
    done = python(START + code)
    if reported is None:
        assert (done.returncode, done.stdout) == (0, "done True\n"), done.stderr
    else:
        assert done.returncode == 2, done.stderr
        assert reported in done.stdout
        assert "precision=bf16" in done.stdout


def test_shapes_stay_few_over_a_whole_run(python, tmp_path: Path) -> None:
    code = (
        "from whet.data.batch import Ragged\n"
        "lengths = [1 + (7 * i * i + 3 * i) % 61 for i in range(203)]\n"
        "tokens = Ragged.of([torch.full((n,), 1.0) for n in lengths])\n"
        "m = nn.Linear(1, 1)\n"
        "def loss(micro):\n"
        "    return (m(micro.tokens.values[..., None]).sum(), micro.tokens.lengths.sum())\n"
        "overrides = {'micro_batch': 11, 'lengths': HOW}\n"
        "fit(m, {'tokens': tokens}, loss=loss, epochs=4, global_batch_size=32, run=HOW, overrides=overrides,\n"
        "    split_batch=True)\n"
    )
    counts = {}
    for how in ("bucketed", "sorted"):
        done = python(START + code.replace("HOW", repr(how)))
        assert done.returncode == 0, done.stdout + done.stderr
        counts[how] = [event.get("num_shapes") for event in events(tmp_path / how, "epoch")]
    assert max(counts["bucketed"]) <= 12
    assert counts["sorted"][-1] > 20, "or the test could not fail"


# --- the whole command -----------------------------------------------------------------------------------------------

FAKE_CAFFEINATE = '#!/bin/sh\necho "$*" > "$(dirname "$0")/said"\nwhile kill -0 "$3" 2>/dev/null; do sleep 0.05; done\n'


def test_a_simulated_mac_is_kept_awake_while_it_trains_and_not_longer(python, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "caffeinate").write_text(FAKE_CAFFEINATE)
    (tools / "caffeinate").chmod(0o755)
    code = (
        "import time\n"
        "def on_event(kind, fields):\n"
        "    while not os.path.exists('tools/said'): time.sleep(0.01)\n"
        # Only our own children; they briefly have the name of the tool, and others may end meanwhile.
        "def read(p, name):\n"
        "    try: return open(f'/proc/{p}/{name}').read()\n"
        "    except OSError: return ') x 0'\n"
        "def find(): return [p for p in os.listdir('/proc') if p.isdecimal() and 'tools/caffeinate' in\n"
        "    read(p, 'cmdline') and int(read(p, 'stat').rpartition(')')[2].split()[1]) == os.getpid()]\n"
        "model = net()\n"
        "def loss(micro):\n"
        "    while not os.path.exists('tools/said'): time.sleep(0.01)\n"
        "    print(len(find()) if not os.path.exists('seen') else ''); open('seen', 'w')\n"
        "    return ((model(micro.x) - micro.y) ** 2).mean()\n"
        "fit(model, data(), loss=loss, max_steps=1)\n"
        "print(len(find()), open('tools/said').read().split() == ['-i', '-w', str(os.getpid())])\n"
    )
    done = python(START + code, PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "0", "True"]


def test_missing_caffeinate_is_reported_unless_keep_awake_is_off(python) -> None:
    done = python(START + "fit(net(), data(), on_event='line')")
    assert done.stderr.count("caffeinate was not found") == 1
    done = python(START + "fit(net(), data(), on_event='line', overrides={'keep_awake': 'off'})")
    assert "caffeinate" not in done.stderr
