"""The option `model` without torch: defaults, sizes, errors."""

import json
import re
import shlex
from pathlib import Path

import pytest

from paths import ROOT
from whet.base.errors import UsageError, WhetError
from whet.config.resolve import resolve_config
from whet.recipes.text.backbone import BERT_BASE, local_folder, read_backbone
from whet.recipes.text.config import TextConfig, describe
from whet.recipes.text.recipe import TextRecipe
from whet.recipes.text.tokenizer import write_files

MINILM = {
    "model_type": "bert",
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30_522,
}


def model(folder: Path, **changes: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MINILM, **changes}))
    return str(folder)


def config(*args: str) -> TextConfig:
    return resolve_config(TextConfig, args).config


def test_pretrained_defaults_are_those_of_the_paper_and_can_be_overridden(tmp_path: Path) -> None:
    word = f"model={model(tmp_path)}"
    tuned, small = config(word), config()
    defaults = (tuned.lr, tuned.epochs, tuned.warmup_share, tuned.global_batch_size, tuned.dropout, tuned.clip)
    assert defaults == (2e-5, 4, 0.1, 32, 0.1, 1.0)
    assert (tuned.optimizer, tuned.schedule, tuned.arch.max_length) == ("adamw", "linear", 256)
    assert (small.lr, small.epochs, small.warmup_share, small.arch.max_length) == (1e-3, 10, 0.06, 64)
    mine = config(word, "lr=5e-5", "epochs=2", "warmup_share=0", "arch.max_length=77")
    assert (mine.lr, mine.epochs, mine.warmup_share, mine.arch.max_length) == (5e-5, 2, 0, 77)
    assert (config(word, "lora=8").lr, config(word, "freeze=encoder").lr, config(word, "freeze=6").lr) == (
        2e-4,
        1e-3,
        2e-5,
    )
    # The saved config of a run is complete and resolves to the same values.
    assert TextConfig.model_validate(tuned.model_dump(mode="json")) == tuned


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["freeze=2"], "freeze needs a pretrained model"),
        (["lora=8"], "lora needs a pretrained model"),
        (["model={m}", "arch.layers=2"], "arch.layers applies to model=small only"),
        (["model={m}", "lora=8", "lengths=packed"], "packed batches need model=small"),
        (["model={m}", "freeze=2", "lengths=packed_bucketed"], "packed batches need model=small"),
        (["attention_dropout=0.1"], "attention_dropout needs a pretrained model"),
        (["model={m}", "lora=8", "freeze=2"], "LoRA freezes the model already"),
    ],
)
def test_incompatible_options_are_rejected(tmp_path: Path, args: list[str], what: str) -> None:
    with pytest.raises(UsageError, match=what) as error:
        describe(config(*(word.format(m=model(tmp_path)) for word in args)))
    assert len(str(error.value).splitlines()) == 3


def test_sizes_are_read_without_torch(tmp_path: Path) -> None:
    # MiniLM has 22,713,216 parameters; a head for three classes is added.
    assert read_backbone(model(tmp_path / "a")).num_parameters(num_classes=3) == 22_713_216 + 3 * 385
    workload = describe(config(f"model={model(tmp_path / 'a', max_position_embeddings=100)}"))
    assert (workload.max_length, workload.can_pack, workload.lengths_vary) == (100, True, True)
    name = "allenai/scibert_scivocab_uncased"
    assert read_backbone(name) == BERT_BASE
    # Assumed sizes are reported.
    recipe = TextRecipe()
    assert re.search(f"{name}.*BERT base", *recipe.assumptions(config(f"model={name}")))
    assert recipe.assumptions(config(f"model={model(tmp_path / 'a')}")) == ()
    assert recipe.assumptions(config()) == ()
    # Another architecture: counted from the headers of its safetensors files.
    other = Path(model(tmp_path / "b", model_type="roberta"))
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"shape": [7, 11]}, "v": {"shape": [5]}}).encode()
    (other / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    backbone = read_backbone(str(other))
    assert describe(config(f"model={other}")).can_pack
    assert not describe(config(f"model={model(tmp_path / 'c', model_type='electra')}")).can_pack
    assert (backbone.num_parameters(num_classes=2), backbone.max_tokens) == (82 + 2 * 385, 510)


@pytest.mark.parametrize(
    ("kind", "padding", "most"),
    [("bert", 3, 512), ("roberta", 1, 510), ("roberta", 3, 508), ("data2vec-text", 1, 510), ("mpnet", 0, 510)],
)
def test_roberta_positions_start_after_the_padding_index(tmp_path: Path, kind: str, padding: int, most: int) -> None:
    assert read_backbone(model(tmp_path / "a", model_type=kind, pad_token_id=padding)).max_tokens == most


def test_invalid_models_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("[1]")
    for word, what in (
        (str(tmp_path / "missing"), "no such model"),
        ("./here", "no such model"),
        ("a/b/c", "no such model"),
        (str(tmp_path / "empty"), "has no config.json"),
    ):
        with pytest.raises(UsageError, match=what):
            local_folder(word)
    with pytest.raises(UsageError, match="has no model_type"):
        read_backbone(str(tmp_path / "odd"))


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "a\\b", ""])
def test_a_saved_tokenizer_writes_inside_its_folder_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(WhetError, match="invalid file name"):
        write_files({name: "x"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_commands_in_the_docs_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "text.md").read_text()
    commands = re.findall(r"^\$ whet (?:train|plan) text (.*?)(?:\s+#.*)?$", page, re.MULTILINE)
    assert len(commands) == 12
    (tmp_path / "models").mkdir()
    model(tmp_path / "models" / "scibert")
    (tmp_path / "reviews.csv").write_text("text,label\n")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        args = [word for word in shlex.split(command) if re.match(r"[a-z_.]+=", word)]
        assert describe(config(*args)).num_parameters
