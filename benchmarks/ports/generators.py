"""Ports of loops that train generators of images."""

from ports.port import Edit, Port
from ports.stand_ins import write_images

_TRAINER = "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py"

DIFFUSION = Port(
    name="denoising-diffusion",
    repository="lucidrains/denoising-diffusion-pytorch",
    files=("denoising_diffusion_pytorch",),
    script="run.py",
    # The project is a library; this is the usage in its README with smaller numbers.
    driver="""
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

    if __name__ == "__main__":
        diffusion = GaussianDiffusion(Unet(dim=8, dim_mults=(1, 2)), image_size=16, timesteps=20)
        Trainer(
            diffusion,
            "images",
            train_batch_size=8,
            gradient_accumulate_every=2,
            train_num_steps=100,
            save_and_sample_every=50,
            num_samples=4,
            calculate_fid=False,
        ).train()
    """,
    num_backwards=2,
    prepare=lambda: write_images("images", count=112, size=20),
    edits=(
        Edit(file=_TRAINER, first="import torch", new="import torch\nimport whet"),
        Edit(
            file=_TRAINER,
            first="dl = DataLoader(",
            last="self.dl = cycle",
            new="""
            self.dl = DataLoader(self.ds, batch_size = train_batch_size * gradient_accumulate_every, shuffle = True)
            """,
        ),
        Edit(file=_TRAINER, first="self.model, self.opt ="),
        Edit(
            file=_TRAINER,
            first="with tqdm(initial = self.step",
            last="self.step += 1",
            new="""
            with whet.Session(
                self.ema,
                self.opt,
                self.dl,
                epochs = self.train_num_steps,
                max_steps = self.train_num_steps,
                clip = self.max_grad_norm,
                run = self.results_folder / 'run',
                overrides = dict(micro_batch = self.batch_size),
            ) as session:
                for batch in session:
                    session.step(self.model, batch)
                    self.step = session.progress.step
            """,
        ),
        Edit(file=_TRAINER, first="pbar.update(1)"),
    ),
)

DCGAN = Port(
    name="dcgan",
    repository="pytorch/examples",
    files=("dcgan/main.py",),
    script="dcgan/main.py",
    arguments=(
        *("--dataset", "fake", "--batchSize", "10", "--ngf", "8", "--ndf", "8", "--niter", "1", "--workers", "0"),
        *("--manualSeed", "1"),
    ),
    num_backwards=3,
    edits=(
        Edit(first="import argparse", new="import argparse\nimport whet"),
        Edit(
            first="for epoch in range(opt.niter)",
            last="for i, data in enumerate(dataloader",
            new="""
            def manual_batches(session):
                for batch in session:
                    with session.manual(batch) as data:
                        yield data

            models, optimizers = {'d': netD, 'g': netG}, {'d': optimizerD, 'g': optimizerG}
            with whet.Session(models, optimizers, dataloader, epochs=opt.niter, run='runs/dcgan') as session:
                for data in manual_batches(session):
                    epoch, i = divmod(session.progress.step, len(dataloader))
            """,
        ),
        Edit(first="optimizerG.step()", new="optimizerG.step()\nsession.log_loss(errD + errG)"),
    ),
)

PORTS: tuple[Port, ...] = (DIFFUSION, DCGAN)
