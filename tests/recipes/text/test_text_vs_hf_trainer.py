"""A pretrained model trained by whet and by the Trainer of transformers has the same losses."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_bert import write_rows, write_tiny_bert
from whet.config.resolve import resolve_config
from whet.data.order import epoch_order
from whet.device.rng import seed_everything
from whet.recipes.runner import train_recipe
from whet.recipes.text.corpus_reader import load_corpus
from whet.recipes.text.pretrained import as_pretrained
from whet.recipes.text.recipe import recipe as text_recipe
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = [pytest.mark.torch, pytest.mark.slow]

NUM_STEPS, BATCH = 50, 8

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")


def test_losses_equal_those_of_the_hf_trainer(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "model")
    table = write_rows(tmp_path / "pairs.jsonl", num_rows=210, has_pairs=True)
    recipe = text_recipe()
    args = (f"model={folder}", f"data={table}", "pair_column=sentence2", f"global_batch_size={BATCH}", "dropout=0")
    # Two micro-batches and packing must not matter.
    how = ("lr=3e-3", "warmup_steps=0", f"max_steps={NUM_STEPS}", "epochs=9", "micro_batch=4", "threads=1", "seed=3")
    resolved = resolve_config(recipe.Config, [*args, *how])
    corpus, data = load_corpus(resolved.config).corpus, recipe.data(resolved.config)
    seed_everything(resolved.config.seed)
    network = copy.deepcopy(as_pretrained(recipe.model(resolved.config, data)).network)  # type: ignore[arg-type]
    assert len(corpus.train) % BATCH == 0, "Trainer has no short batch in the middle"

    train_recipe(text_recipe(), resolved, run=tmp_path / "run", device="cpu")
    ours = [event.number("loss") for event in read_events(open_run(tmp_path / "run"), kinds=("step",))]

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    order = [row for epoch in range(9) for row in epoch_order(len(corpus.train), seed=3, epoch=epoch)]
    samples = [
        {
            **tokenizer(corpus.train.texts[row], corpus.train.pairs[row], truncation=True),
            "labels": corpus.train.labels[row],
        }
        for row in order[: NUM_STEPS * BATCH]
    ]
    theirs = losses_of_trainer(network, samples, tokenizer, folder=tmp_path / "trainer")

    assert len(ours) == len(theirs) == NUM_STEPS
    assert max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) < 1e-4
    assert sum(ours[-10:]) < 0.8 * sum(ours[:10]), "a model that learns nothing would agree too"
    longest = max(len(sample["input_ids"]) for sample in samples)
    assert longest == 24, "some texts are truncated"
    assert any(1 in sample["token_type_ids"] for sample in samples)


def losses_of_trainer(network: Any, samples: list[dict[str, Any]], tokenizer: Any, *, folder: Path) -> list[float]:
    losses: list[float] = []

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(samples)

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            result = super().compute_loss(*given, **named)
            losses.append(float(result.detach()))
            return result

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collate = transformers.DataCollatorWithPadding(tokenizer)
    InOrder(model=network, args=arguments, train_dataset=samples, data_collator=collate).train()
    return losses
