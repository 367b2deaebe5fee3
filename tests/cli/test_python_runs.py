"""Commands for runs and models that were made from Python: they work with a function, or say what to type."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import whet
from homes import new_home
from paths import SUPPORT, Run
from whet.cli import main as cli

pytestmark = pytest.mark.torch

SCRIPT = str(SUPPORT / "script_training.py")
MODEL = f"{SCRIPT}:make_model"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the script."""
    import sys

    folder = tmp_path_factory.mktemp("script")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(SUPPORT))
        import script_training

        script_training.main()
        del sys.modules["script_training"]
    return folder


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in str(path))


def test_a_run_records_the_function_that_made_it(trained: Path) -> None:
    header = json.loads((trained / "runs/mine/run.json").read_text())
    assert header["script"] == f"{SCRIPT}:main", "not fit(), which needs arguments"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("prove", "runs/mine"), f"try: whet prove {SCRIPT}:main"),
        (("bench", "runs/mine"), f"try: {SCRIPT}:main instead of runs/mine"),
        (("compare", "runs/mine"), f"try: {SCRIPT}:main instead of runs/mine"),
        (("check", "runs/mine"), f"try: {SCRIPT}:main instead of runs/mine"),
        (("predict", "runs/mine", "a text"), f"whet predict runs/mine --model {SCRIPT}:make_model inputs.npy"),
        (("export", "runs/mine", "--to", "transformers"), "whet export runs/mine --to safetensors; or --model"),
        (("export", "runs/mine", "--to", "transformers", "--model", MODEL), "try: --to safetensors"),
        (("predict", "runs/mine", "--model", MODEL, "x.npy"), "--out predictions.npy"),
        (
            ("predict", "runs/mine", "--model", MODEL, "x.pt", "--out", "p.npy"),
            "inputs must be a .npy or .safetensors file",
        ),
        (("predict", "runs/mine", "--model", MODEL, "y.npy", "--out", "p.csv"), "--out must end in .npy"),
        (("predict", "runs/mine", "--model", f"{SCRIPT}:make_data", "y.npy", "--out", "p.npy"), "returns no model"),
        (("bench", f"{SCRIPT}:needs_arguments"), "def needs_arguments(rate=...)"),
        (("bench", f"{SCRIPT}:main", "epochs=3"), "only a recipe has options"),
        (("prove", f"{SCRIPT}:returns_nothing"), "it returned without training"),
        (("prove", f"{SCRIPT}:make_model"), "it returned a Sequential"),
        (("prove", f"{SCRIPT}:nothing"), "does not define nothing()"),
        (("train", f"{SCRIPT}:main"), "is a script that trains, not a recipe"),
        # Without the process that restarts it, which imports torch.
        (
            ("train", SCRIPT, "--max-restarts=0"),
            f"try: python {SCRIPT}; whet plan, prove, bench, check and compare take",
        ),
        (("plan", "flat.py"), 'if __name__ == "__main__": main()'),
        (
            ("train", "flat.py", "--max-restarts=0"),
            "python flat.py; whet plan, prove, bench, check and compare take flat.py",
        ),
        (("prove", "flat.py:main"), 'if __name__ == "__main__": main()'),
        (("compare", f"{SCRIPT}:make_model"), "return model, (x, y); or call whet.train(...)"),
        (("check", f"{SCRIPT}:returns_nothing"), "cannot verify"),
    ],
)
def test_errors_say_what_to_type(warm_whet: Run, trained: Path, words: tuple[str, ...], hint: str) -> None:
    (trained / "flat.py").write_text("import script_training\nscript_training.main()\n")
    np.save(trained / "y.npy", np.zeros((3, 8)))
    before = files(trained)
    done = warm_whet(*words, cwd=trained, PYTHONPATH=str(SUPPORT))
    assert done.returncode == 2, done.stderr
    assert hint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 3, done.stderr
    assert files(trained) == before, "nothing is written"


def test_safetensors_of_any_run_without_a_recipe(warm_whet: Run, trained: Path, tmp_path: Path) -> None:
    for options in ((), ("--model", MODEL)):
        done = warm_whet(
            "export", "runs/mine", "--to", "safetensors", "--out", tmp_path / "w", "--force", *options, cwd=trained
        )
        assert done.returncode == 0, done.stderr
        import script_training

        model = whet.load(trained / "runs/mine", script_training.make_model())
        weights = load_file(tmp_path / "w" / "model.safetensors")
        assert weights.keys() == model.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items()), "averaged ones"
    assert json.loads((tmp_path / "w" / "whet-export.json").read_text())["step"] == 32


def test_a_transformers_model_is_saved_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in this process: importing transformers takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHET_HOME", str(new_home(tmp_path / "whet-home")))
    (tmp_path / "bert.py").write_text(
        "import torch, whet\n"
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "def make_model():\n"
        "    config = BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,\n"
        "                        intermediate_size=16, max_position_embeddings=16)\n"
        "    return BertForSequenceClassification(config)\n"
        "def main():\n"
        "    model = make_model()\n"
        "    data = {'input_ids': torch.randint(0, 50, (32, 6)), 'labels': torch.randint(0, 2, (32,))}\n"
        "    whet.train(model, data, loss=lambda m: model(input_ids=m.input_ids, labels=m.labels).loss,\n"
        "               optimizer=torch.optim.AdamW(model.parameters()), global_batch_size=8, run='runs/bert',\n"
        "               overrides={'threads': 1}, on_event=None)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    runpy.run_path("bert.py", run_name="__main__")
    words = ["export", "runs/bert", "--to", "transformers", "--model", "bert.py:make_model", "--out", "saved"]
    assert cli.run(words) == 0
    from transformers import AutoModelForSequenceClassification

    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    loaded = whet.load(tmp_path / "runs/bert", AutoModelForSequenceClassification.from_config(saved.config))
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
    inputs = {"input_ids": torch.randint(0, 50, (10, 6)), "attention_mask": torch.ones(10, 6, dtype=torch.int64)}
    save_file(inputs, tmp_path / "inputs.safetensors")
    words = [
        "predict",
        "runs/bert",
        "--model",
        "bert.py:make_model",
        "inputs.safetensors",
        "--out",
        "p.npy",
        "--batch=4",
    ]
    assert cli.run(words) == 0
    expected = loaded.eval()(**inputs).logits.detach().numpy()
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), expected, atol=1e-5)


def test_predict_arrays(warm_whet: Run, trained: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((100, 8))
    np.save(tmp_path / "x.npy", x)
    words = ("predict", "runs/mine", "--model", MODEL, tmp_path / "x.npy", "--out", tmp_path / "p.npy", "--batch", "33")
    done = warm_whet(*words, cwd=trained)
    assert done.returncode == 0, done.stderr
    assert "100 rows, shape (100, 3)" in done.stdout
    import script_training

    model = whet.load(trained / "runs/mine", script_training.make_model()).eval()
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), model(torch.tensor(x).float()).detach(), atol=1e-6)
    assert "the output file exists already" in warm_whet(*words, cwd=trained).stderr
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    done = warm_whet("predict", "runs/mine", "--model", MODEL, tmp_path / "objects.npy", "--out", "o.npy", cwd=trained)
    assert "cannot be read" in done.stderr, "nothing is unpickled"


@pytest.mark.parametrize("function", ["main", "own_loop"])
def test_functions_that_train_are_compared_and_checked(warm_whet: Run, tmp_path: Path, function: str) -> None:
    word = f"{SCRIPT}:{function}"
    done = warm_whet("compare", word, "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert "gradients (4)" in done.stdout
    done = warm_whet("check", word, "--for", "mps", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["findings"] == []
    assert not list(tmp_path.glob("runs*")), "nothing is trained"
    assert not (tmp_path / "after.txt").exists(), "the code after the training does not run"


@pytest.mark.parametrize("function", [pytest.param("main", marks=pytest.mark.slow), "own_loop"])
def test_functions_that_train_are_measured(warm_whet: Run, tmp_path: Path, function: str) -> None:
    done = warm_whet("bench", f"{SCRIPT}:{function}", "--against", "naive", "--budget", "60", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["workload"]["recipe"], result["workload"]["global_batch_size"]) == ("script_training", 16)
    assert not list(tmp_path.glob("runs*")), "nothing is trained"
    assert not (tmp_path / "after.txt").exists(), "the code after the training does not run"


def test_check_finds_a_fault_in_a_function_that_trains(warm_whet: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, whet\n"
        "def main():\n"
        "    model = torch.nn.Linear(4, 2).double()\n"
        "    data = torch.rand(32, 4, dtype=torch.float64)\n"
        "    whet.train(model, data, loss=lambda m: model(m).mean(), global_batch_size=8,\n"
        "               optimizer=torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    done = warm_whet("check", "train.py", "--for", "mps")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "float64" in done.stdout


def test_a_script_that_parses_its_arguments_gets_none_of_whet(warm_whet: Run, tmp_path: Path) -> None:
    code = "import argparse, script_training\ndef main():\n    argparse.ArgumentParser().parse_args()\n"
    (tmp_path / "parses.py").write_text(f"{code}    script_training.main()\n")
    done = warm_whet("check", "parses.py:main", cwd=tmp_path, PYTHONPATH=str(SUPPORT))
    assert done.returncode == 0, done.stderr


def test_a_script_is_planned_for_a_mac(warm_whet: Run, tmp_path: Path) -> None:
    done = warm_whet("plan", f"{SCRIPT}:main", "--machine", "m2-air-8gb", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "workload  script_training: " in done.stdout
    assert "mps" in next(line for line in done.stdout.splitlines() if line.startswith("device "))
    assert "speed " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["whet-home"], "nothing was trained"
    done = warm_whet("plan", f"{SCRIPT}:main", "lr=1", cwd=tmp_path)
    assert (done.returncode, "a script has its settings in its code" in done.stderr) == (2, True)


def test_the_operations_of_a_convolution_are_counted() -> None:
    from torch import nn

    from whet.api.target import call_function, measured_workload

    def main() -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 2))
        data = torch.randn(16, 3, 6, 6), torch.zeros(16, dtype=torch.long)
        optimizer = torch.optim.SGD(net.parameters())
        whet.train(net, data, loss=nn.functional.cross_entropy, optimizer=optimizer, global_batch_size=8)

    workload = measured_workload(call_function(main, "main.py:main"))
    forward = 2 * (36 * 8 * 27 + 8 * 36 * 2)
    assert workload.flops_per_sample == 3 * forward
    assert workload.activation_bytes is not None


@pytest.mark.parametrize(("folder", "message"), [("runs/nope", "no such folder or file"), ("nope", "no such recipe")])
def test_a_folder_that_does_not_exist_is_no_recipe(warm_whet: Run, tmp_path: Path, folder: str, message: str) -> None:
    done = warm_whet("plan", folder, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, f"error: {message}")
