"""Ports of loops that train on text."""

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ports.port import Edit, Port
from ports.record import PortRecord
from ports.stand_ins import text, write


def _prepare_nanogpt() -> None:
    if not Path("configurator.py").exists():
        Path("configurator.py").symlink_to("code/configurator.py")
    folder = Path("data/letters")
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.frombuffer(text(4_000).encode(), dtype=np.uint8).astype(np.uint16)
    for name in ("train.bin", "val.bin"):
        if not (folder / name).exists():
            tokens.tofile(folder / name)


def _replay_nanogpt(record: PortRecord) -> None:
    """Return the recorded positions where get_batch draws some for training."""
    draw = torch.randint
    positions = iter([sample for batch in record.batches for sample in batch.ids])

    def recorded(high: int, size: tuple[int, ...]) -> torch.Tensor:
        caller = sys._getframe(1)
        assert caller.f_code.co_name == "get_batch"
        if caller.f_back is not None and caller.f_back.f_code.co_name == "estimate_loss":
            return draw(high, size)
        # The loop reads one batch more than it trains on.
        return torch.tensor([next(positions, 0) for _ in range(size[0])])

    torch.randint = recorded  # type: ignore[assignment]


NANOGPT = Port(
    name="nanoGPT",
    repository="karpathy/nanoGPT",
    files=("train.py", "model.py", "configurator.py"),
    script="train.py",
    arguments=(
        *("--device=cpu", "--compile=False", "--dtype=float32", "--dataset=letters", "--batch_size=4"),
        *("--gradient_accumulation_steps=3", "--block_size=32", "--n_layer=2", "--n_head=2", "--n_embd=32"),
        *("--dropout=0.1", "--max_iters=99", "--lr_decay_iters=100", "--warmup_iters=10", "--learning_rate=1e-3"),
        *("--eval_interval=25", "--eval_iters=2"),
    ),
    prepare=_prepare_nanogpt,
    replay=_replay_nanogpt,
    num_backwards=3,
    edits=(
        Edit(
            first="X, Y = get_batch('train') # fetch",
            last="break",
            skip_last=1,
            new="""
            import whet

            class Blocks(torch.utils.data.Dataset):
                data = np.memmap(os.path.join(data_dir, 'train.bin'), dtype=np.uint16, mode='r')

                def __len__(self):
                    return len(self.data) - block_size

                def __getitem__(self, i):
                    block = torch.from_numpy(self.data[i : i + block_size + 1].astype(np.int64))
                    return block[:-1], block[1:]

            blocks, steps, per_step = Blocks(), max_iters + 1, batch_size * gradient_accumulation_steps
            draws = torch.utils.data.RandomSampler(blocks, replacement=True, num_samples=steps * per_step)
            with whet.Session(
                model,
                optimizer,
                torch.utils.data.DataLoader(blocks, batch_size=per_step, sampler=draws),
                schedule=lambda step: get_lr(step - 1) / learning_rate if decay_lr else 1,
                clip=grad_clip or None,
                seed=1337,
                max_steps=steps,
                eval_every=eval_interval,
                run='runs/nanogpt',
                split_batch=True,  # no target is ignored (-1), so the mean over tokens is a mean over samples
                overrides={'micro_batch': batch_size},
            ) as session:
                for batch in session:
                    session.step(lambda batch: model(*batch)[1], batch)
                    if session.due('evaluate'):
                        session.log(**estimate_loss())
            """,
        ),
    ),
)


MINGPT = Port(
    name="minGPT",
    repository="karpathy/minGPT",
    files=("mingpt", "projects/chargpt/chargpt.py"),
    script="projects/chargpt/chargpt.py",
    paths=("",),
    arguments=(
        *("--model.model_type=gpt-nano", "--trainer.max_iters=100", "--trainer.batch_size=8"),
        *("--trainer.num_workers=0", "--data.block_size=32"),
    ),
    # The script samples with a prompt of Shakespeare's, so the text must have its letters.
    prepare=lambda: write("input.txt", "O God, O God!\n" + text(2_000)),
    edits=(
        Edit(file="mingpt/trainer.py", first="import torch", new="import torch\nimport whet"),
        Edit(
            file="mingpt/trainer.py",
            first="model.train()",
            last="break",
            new="""
            def batch_loss(batch):
                logits, self.loss = model(*batch)
                return self.loss

            self.iter_time = time.time()
            with whet.Session(
                model,
                self.optimizer,
                train_loader,
                max_steps=config.max_iters,
                clip=config.grad_norm_clip,
                run="runs/mingpt",
            ) as session:
                for batch in session:
                    session.step(batch_loss, batch)
                    self.iter_num = session.progress.step - 1
                    self.trigger_callbacks('on_batch_end')
                    tnow = time.time()
                    self.iter_dt = tnow - self.iter_time
                    self.iter_time = tnow
            """,
        ),
    ),
)


def _prepare_word_language_model() -> None:
    for name, num_words in (("train", 924), ("valid", 240), ("test", 240)):
        write(f"data/wikitext-2/{name}.txt", text(num_words))


WORD_LANGUAGE_MODEL = Port(
    name="word_language_model",
    repository="pytorch/examples",
    files=("word_language_model/main.py", "word_language_model/data.py", "word_language_model/model.py"),
    script="word_language_model/main.py",
    arguments=("--batch_size", "4", "--bptt", "10", "--epochs", "4", "--emsize", "32", "--nhid", "32"),
    prepare=_prepare_word_language_model,
    edits=(
        Edit(first="import argparse", new="import argparse\nimport whet"),
        Edit(
            first="if args.use_optimizer",
            last="optimizer =",
            new="""
            if args.use_optimizer:
                optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
            # The rate is divided by 4 after each evaluation that is not the best one.
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0, threshold=0)
            """,
        ),
        Edit(
            first="def train()",
            last="if args.dry_run",
            new="""
            class Hidden(nn.Module):
                # The hidden state goes from step to step, so it is saved with the model.
                def __init__(self):
                    super().__init__()
                    self.reset()

                def reset(self):
                    for name, value in zip("hc", model.init_hidden(args.batch_size)):
                        self.register_buffer(name, value)

            hidden = Hidden()

            def batch_loss(batch):
                data, targets = batch
                output, hidden.next = model(data, (hidden.h, hidden.c))
                return criterion(output, targets)

            def train():
                chunks = range(0, train_data.size(0) - 1, args.bptt)
                with whet.Session(
                    nn.ModuleList([model, hidden]),
                    optimizer,
                    torch.utils.data.DataLoader(
                        chunks, batch_size=1, collate_fn=lambda chunk: get_batch(train_data, chunk[0])
                    ),
                    clip=args.clip,
                    schedule=scheduler,
                    goal="val_loss",
                    epochs=args.epochs,
                    seed=args.seed,
                    run="runs/words",
                ) as session:
                    for batch in session:
                        session.step(batch_loss, batch)
                        hidden.h, hidden.c = repackage_hidden(hidden.next)
                        if session.due("evaluate"):
                            session.log(val_loss=evaluate(val_data))
                            model.train()
                            hidden.reset()
            """,
        ),
        # The line after `if args.dry_run`.
        Edit(first="break"),
        Edit(
            first="lr = args.lr",
            last="model.rnn.flatten_parameters",
            new="""
            train()
            whet.load("runs/words", nn.ModuleList([model, hidden]), "best")
            """,
        ),
    ),
)


def _prepare_run_glue() -> None:
    import evaluate
    from transformers import BertConfig, BertForSequenceClassification

    class Metric:
        def add_batch(self, **_: Any) -> None: ...

        def compute(self) -> dict[str, float]:
            return {}

    # evaluate.load downloads the code of a metric.
    evaluate.load = lambda *_: Metric()
    lines = text(280 * 12).splitlines()
    for name, part in (("train", lines[:200]), ("val", lines[200:240])):
        rows = [(line[: 20 + number % 40], "long" if number % 2 else "short") for number, line in enumerate(part)]
        if not Path(f"{name}.csv").exists():
            with Path(f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([("sentence", "label"), *rows])
    if not Path("tiny-bert").exists():
        words = sorted({word for line in lines for word in line.split()})
        write("tiny-bert/vocab.txt", "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
        config = BertConfig(
            vocab_size=5 + len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        with torch.random.fork_rng():
            BertForSequenceClassification(config).save_pretrained("tiny-bert")


RUN_GLUE = Port(
    name="run_glue",
    repository="huggingface/transformers",
    files=("examples/pytorch/text-classification/run_glue_no_trainer.py",),
    script="examples/pytorch/text-classification/run_glue_no_trainer.py",
    arguments=(
        *("--model_name_or_path", "tiny-bert", "--train_file", "train.csv", "--validation_file", "val.csv"),
        *("--per_device_train_batch_size", "8", "--num_train_epochs", "4", "--learning_rate", "1e-3"),
        *("--num_warmup_steps", "10", "--weight_decay", "0.01", "--seed", "0", "--output_dir", "out"),
    ),
    prepare=_prepare_run_glue,
    edits=(
        Edit(first="import argparse", new="import argparse\nimport whet"),
        Edit(
            first="# Prepare everything with our",
            last="accelerator.save_state",
            skip_last=1,
            new="""
            def accuracy(model, batches):
                is_right = [model(**batch).logits.argmax(dim=-1) == batch["labels"] for batch in batches]
                return {"accuracy": torch.cat(is_right).float().mean().item()}

            eval_metric = whet.train(
                model,
                train_dataloader,
                loss=lambda batch: model(**batch),
                optimizer=optimizer,
                schedule=lr_scheduler,
                schedule_interval="step",
                epochs=args.num_train_epochs,
                max_steps=args.max_train_steps,
                seed=args.seed,
                evaluate=accuracy,
                val=eval_dataloader,
                run="runs/glue",
            ).metrics
            """,
        ),
    ),
)

PORTS: tuple[Port, ...] = (NANOGPT, MINGPT, WORD_LANGUAGE_MODEL, RUN_GLUE)
