"""Ports of loops that train on images."""

from pathlib import Path

from ports.port import Edit, Port
from ports.stand_ins import image_dataset, stub_module, use_mnist, write_images

MNIST = Port(
    name="mnist",
    repository="pytorch/examples",
    files=("mnist/main.py",),
    script="mnist/main.py",
    arguments=("--epochs", "4", "--batch-size", "16", "--no-accel"),
    prepare=lambda: use_mnist((400, 100)),
    edits=(
        Edit(first="import argparse", new="import argparse\nimport whet"),
        # whet.train replaces train() and test().
        Edit(first="def train(", last="100. * correct /"),
        Edit(
            first="for epoch in range",
            last="scheduler.step()",
            new="""
            whet.train(
                model,
                train_loader,
                loss=F.nll_loss,
                optimizer=optimizer,
                schedule=scheduler,
                schedule_interval="epoch",
                epochs=args.epochs,
                val=test_loader,
                run="runs/mnist",
            )
            """,
        ),
    ),
)


def _prepare_vae() -> None:
    use_mnist((400, 96))
    Path("results").mkdir(exist_ok=True)


VAE = Port(
    name="vae",
    repository="pytorch/examples",
    files=("vae/main.py",),
    script="vae/main.py",
    arguments=("--epochs", "4", "--batch-size", "16", "--no-accel"),
    prepare=_prepare_vae,
    edits=(
        Edit(first="import argparse", new="import argparse\nimport whet"),
        Edit(
            first="def train(epoch)",
            last="epoch, train_loss",
            new="""
            def batch_loss(batch):
                data, _ = batch
                recon_batch, mu, logvar = model(data)
                return loss_function(recon_batch, data, mu, logvar)


            def train_epochs():
                with whet.Session(model, optimizer, train_loader, epochs=args.epochs, run="runs/vae") as session:
                    for batch in session:
                        session.step(batch_loss, batch)
                        if session.due("evaluate"):
                            yield session.progress.epoch
                            model.train()
            """,
        ),
        Edit(first="for epoch in range", last="train(epoch)", new="for epoch in train_epochs():"),
    ),
)

SIAMESE = Port(
    name="siamese_network",
    repository="pytorch/examples",
    files=("siamese_network/main.py",),
    script="siamese_network/main.py",
    arguments=("--epochs", "4", "--batch-size", "8", "--no-accel"),
    prepare=lambda: use_mnist((200, 40)),
    edits=(
        Edit(first="import argparse", new="import argparse, random, copy\nimport whet"),
        Edit(
            first="def train(",
            last="break",
            new="""
            def batch_loss(model, batch):
                images_1, images_2, targets = batch
                return F.binary_cross_entropy(model(images_1, images_2).squeeze(), targets)
            """,
        ),
        Edit(
            first="for epoch in range",
            last="scheduler.step()",
            new="""
            with whet.Session(
                model,
                optimizer,
                train_loader,
                schedule=scheduler,
                schedule_interval="epoch",
                epochs=args.epochs,
                run="runs/siamese",
            ) as session:
                for batch in session:
                    session.step(lambda batch: batch_loss(model, batch), batch)
                    if session.due("evaluate"):
                        test(model, device, test_loader)
                        model.train()
            """,
        ),
    ),
)


def _prepare_vit() -> None:
    import torchvision

    torchvision.datasets.CIFAR100 = image_dataset((32, 32, 3), 100, sizes=(320, 32))
    stub_module("wandb", init=lambda **_: None, log=lambda _: None, run=stub_module("wandb.run"))


VIT = Port(
    name="vit-pytorch",
    repository="lucidrains/vit-pytorch",
    files=("train_vit_decorr.py", "vit_pytorch"),
    script="train_vit_decorr.py",
    prepare=_prepare_vit,
    edits=(
        Edit(first="from accelerate", last="vit, optim", new="import whet"),
        Edit(
            first="for _ in range(EPOCHS)",
            last="optim.zero_grad",
            new="""
            def total_loss(batch):
                images, labels = batch
                logits, decorr_loss = vit(images)
                cross_entropy = F.cross_entropy(logits, labels)
                total = cross_entropy + decorr_loss * DECORR_LOSS_WEIGHT
                return dict(loss = total, cross_entropy = cross_entropy, decorr_loss = decorr_loss)

            whet.train(vit, dataloader, loss = total_loss, optimizer = optim, epochs = EPOCHS, run = 'runs/vit')
            """,
        ),
    ),
)


def _prepare_timm() -> None:
    for number in range(4):
        write_images(f"images/train/{number}", count=50, size=40)


TIMM = Port(
    name="timm",
    repository="huggingface/pytorch-image-models",
    files=("train.py", "timm"),
    script="train.py",
    arguments=(
        *("--data-dir", "images", "--train-split", "train", "--val-split", "", "--model", "test_vit"),
        *("--num-classes", "4", "--input-size", "3", "32", "32", "--batch-size", "8", "--epochs", "4"),
        *("--warmup-epochs", "1", "--opt", "adamw", "--lr", "1e-3", "--drop", "0.1", "--smoothing", "0.1"),
        *("--clip-grad", "1", "--workers", "1", "--no-prefetcher", "--device", "cpu"),
    ),
    prepare=_prepare_timm,
    edits=(
        Edit(first="import argparse", new="import argparse\nimport whet"),
        Edit(
            first="for epoch in range(start_epoch, num_epochs)",
            last="results.append",
            new="""
            base = optimizer.param_groups[0]["lr"]
            whet.train(
                task,
                loader_train,
                loss=lambda batch: task(*batch),
                optimizer=optimizer,
                schedule=lambda step: lr_scheduler._get_lr((step - 1) // updates_per_epoch)[0] / base,
                clip=args.clip_grad,
                epochs=num_epochs,
                seed=args.seed,
                run="runs/timm",
            )
            """,
        ),
        # train_one_epoch is not needed any more.
        Edit(first="def train_one_epoch(", last="return OrderedDict"),
    ),
)


def _prepare_lightning() -> None:
    use_mnist((60_000, 64))
    import lightning.pytorch.demos.mnist_datamodule as demo
    import torchvision

    demo.MNIST = torchvision.datasets.MNIST


LIGHTNING = Port(
    name="lightning",
    repository="Lightning-AI/pytorch-lightning",
    files=("examples/pytorch/basics/autoencoder.py",),
    script="examples/pytorch/basics/autoencoder.py",
    arguments=(
        *("--trainer.max_steps", "100", "--trainer.accelerator", "cpu", "--trainer.limit_val_batches", "2"),
        *("--trainer.enable_progress_bar", "false", "--trainer.logger", "false"),
    ),
    prepare=_prepare_lightning,
    edits=(
        Edit(first="from os import path", new="from os import path\nimport whet"),
        Edit(
            first="cli.trainer.fit",
            last="predictions =",
            new="""
            whet.train(
                cli.model,
                cli.datamodule.train_dataloader(),
                loss=lambda batch: cli.model.training_step(batch, 0),
                optimizer=cli.model.configure_optimizers(),
                max_steps=cli.trainer.max_steps,
                run="runs/autoencoder",
            )
            cli.trainer.test(cli.model, datamodule=cli.datamodule)
            predictions = cli.trainer.predict(cli.model, datamodule=cli.datamodule)
            """,
        ),
    ),
)

PORTS: tuple[Port, ...] = (MNIST, VAE, SIAMESE, VIT, TIMM, LIGHTNING)
