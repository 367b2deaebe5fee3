"""Models that whet did not write: from transformers, torchvision, timm and plain PyTorch, built by configuration.

Data is random, and no model has dropout, so that the losses of all loops are comparable. Every shape exists in full
size, for a CPU and tiny. A model whose package is missing raises ImportError, which the benchmark reports.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from side_by_side.spec import Spec
from side_by_side.workload import Batch, ForWhet, PeerWorkload, resident_columns
from side_by_side.workloads import foreign_nets as nets

BYTES = {"full": 1 << 30, "cpu": 128 << 20, "tiny": 1 << 20}
"""How much data an epoch has at most, besides `STEPS`."""
STEPS = (8, 512)
"""How many steps an epoch has at least and at most."""
LR = 3e-4


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A model and how its loss is computed from a batch."""

    net: nn.Module
    batch: int
    draw: Callable[[int], Batch]
    """Draws a number of samples."""
    loss: Callable[..., Tensor]
    """Computes the mean loss from the model and the columns of a batch."""
    text: str
    is_image_like: bool = False


class WithLoss(nn.Module):
    """The model for peers: named tensors in, a dict with the loss out."""

    def __init__(self, foreign: Foreign) -> None:
        super().__init__()
        self.net, self._loss = foreign.net, foreign.loss

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self._loss(self.net, *batch.values())}


def make(spec: Spec) -> PeerWorkload:
    torch.manual_seed(0)
    foreign = MODELS[spec.workload.partition("-")[2]](spec.scale)
    torch.manual_seed(1)
    batch_bytes = sum(column.nbytes for column in foreign.draw(1).values()) * foreign.batch
    steps = min(max(BYTES[spec.scale] // batch_bytes, STEPS[0]), STEPS[1])
    columns = foreign.draw(steps * foreign.batch)
    samples = [{name: column[row] for name, column in columns.items()} for row in range(steps * foreign.batch)]
    parameters = sum(parameter.numel() for parameter in foreign.net.parameters())
    return PeerWorkload(
        model=WithLoss(foreign),
        samples=samples,
        collate=torch.utils.data.default_collate,
        collate_fixed=None,
        resident=partial(resident_columns, columns, foreign.batch),
        for_whet=lambda: ForWhet(
            model=foreign.net, data=columns, loss=lambda batch: foreign.loss(foreign.net, *batch), workload=None
        ),
        batch=foreign.batch,
        lr=LR,
        flops=0.0,
        description=f"{foreign.text}; {parameters / 1e6:,.1f} M parameters",
        is_image_like=foreign.is_image_like,
    )


# --- losses -----------------------------------------------------------------------------------------------------------


def own_loss(names: tuple[str, ...]) -> Callable[..., Tensor]:
    """The loss that a Transformers model computes itself."""
    return lambda net, *columns: net(**dict(zip(names, columns, strict=True)))["loss"]


def class_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(net(x), y)


def token_loss(net: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def click_loss(net: nn.Module, dense: Tensor, ids: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(net(dense, ids), y)


def noise_loss(net: nn.Module, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Predict the noise of a diffusion step."""
    keep = torch.cos(time * math.pi / 2)[:, None, None, None]
    return functional.mse_loss(net(keep * x + (1 - keep**2).sqrt() * noise, time), noise)


# --- data -------------------------------------------------------------------------------------------------------------


def draw_tokens(count: int, *, vocabulary: int, length: int, names: tuple[str, ...] = ("tokens",)) -> Batch:
    """Draw tokens; a second name gets the same ones, as the labels of a language model."""
    tokens = torch.randint(vocabulary, (count, length))
    return dict.fromkeys(names, tokens)


def draw_texts(count: int, *, vocabulary: int, length: int, classes: int) -> Batch:
    """Draw texts that are padded to one length."""
    lengths = torch.randint(length // 4, length + 1, (count,))
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {
        "input_ids": torch.randint(1, vocabulary, (count, length)) * mask,
        "attention_mask": mask,
        "labels": torch.randint(classes, (count,)),
    }


def draw_images(
    count: int, *, size: int, classes: int, channels: int = 3, names: tuple[str, str] = ("x", "y"), is_map: bool = False
) -> Batch:
    labels = torch.randint(classes, (count, size, size) if is_map else (count,))
    return dict(zip(names, (torch.randn(count, channels, size, size), labels), strict=True))


def draw_noise(count: int, *, size: int) -> Batch:
    shape = (count, 3, size, size)
    return {"x": torch.randn(shape), "noise": torch.randn(shape), "time": torch.rand(count)}


def draw_clicks(count: int, *, rows: int, fields: int, dense: int) -> Batch:
    clicks = torch.randint(2, (count,)).float()
    return {"dense": torch.randn(count, dense), "ids": torch.randint(rows, (count, fields)), "y": clicks}


def draw_speech(count: int, *, bands: int, frames: int, vocabulary: int, length: int) -> Batch:
    tokens = torch.randint(vocabulary, (count, length))
    return {"input_features": torch.randn(count, bands, frames), "labels": tokens}


# --- models -----------------------------------------------------------------------------------------------------------


def gpt2(scale: str) -> Foreign:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, length, vocabulary, batch = {
        "full": (12, 768, 12, 1024, 50_257, 16),
        "cpu": (4, 192, 4, 128, 2_000, 16),
        "tiny": (1, 16, 2, 8, 50, 4),
    }[scale]
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, vocab_size=vocabulary,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    names = ("input_ids", "labels")
    return Foreign(
        net=GPT2LMHeadModel(config),
        batch=batch,
        draw=partial(draw_tokens, vocabulary=vocabulary, length=length, names=names),
        loss=own_loss(names),
        text=f"GPT-2 of transformers, {layers} layers of {width}, {batch} x {length} tokens",
    )


def bert(scale: str) -> Foreign:
    from transformers import BertConfig, BertForSequenceClassification

    layers, width, heads, length, vocabulary, batch = {
        "full": (12, 768, 12, 128, 30_522, 64),
        "cpu": (3, 128, 4, 64, 2_000, 16),
        "tiny": (1, 16, 2, 8, 50, 4),
    }[scale]
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
        vocab_size=vocabulary, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    return Foreign(
        net=BertForSequenceClassification(config),
        batch=batch,
        draw=partial(draw_texts, vocabulary=vocabulary, length=length, classes=3),
        loss=own_loss(("input_ids", "attention_mask", "labels")),
        text=f"BERT of transformers, {layers} layers of {width}, {batch} texts padded to {length}",
    )


def vit(scale: str) -> Foreign:
    from transformers import ViTConfig, ViTForImageClassification

    layers, width, heads, size, patch, batch = {
        "full": (12, 768, 12, 224, 16, 128),
        "cpu": (4, 128, 4, 32, 4, 16),
        "tiny": (1, 16, 2, 8, 4, 4),
    }[scale]
    config = ViTConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
        image_size=size, patch_size=patch, num_labels=10,
    )  # fmt: skip
    names = ("pixel_values", "labels")
    return Foreign(
        net=ViTForImageClassification(config),
        batch=batch,
        draw=partial(draw_images, size=size, classes=10, names=names),
        loss=own_loss(names),
        text=f"ViT of transformers, {layers} layers of {width}, {batch} x {size} x {size}",
    )


def whisper(scale: str) -> Foreign:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers, width, heads, frames, length, vocabulary, batch = {
        "full": (4, 384, 6, 3000, 64, 51_865, 32),
        "cpu": (2, 96, 2, 200, 16, 1_000, 8),
        "tiny": (1, 16, 2, 8, 4, 50, 4),
    }[scale]
    config = WhisperConfig(
        encoder_layers=layers, decoder_layers=layers, d_model=width, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        vocab_size=vocabulary, max_source_positions=frames // 2, max_target_positions=length, use_cache=False,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0, apply_spec_augment=False,
    )  # fmt: skip
    return Foreign(
        net=WhisperForConditionalGeneration(config),
        batch=batch,
        draw=partial(draw_speech, bands=80, frames=frames, vocabulary=vocabulary, length=length),
        loss=own_loss(("input_features", "labels")),
        text=f"Whisper of transformers, {layers} + {layers} layers of {width}, {batch} x {frames} frames",
    )


def resnet50(scale: str) -> Foreign:
    from torchvision.models import resnet18
    from torchvision.models import resnet50 as make_resnet50

    size, batch = {"full": (224, 256), "cpu": (32, 16), "tiny": (32, 4)}[scale]
    return Foreign(
        net=make_resnet50(num_classes=1000) if scale == "full" else resnet18(num_classes=10),
        batch=batch,
        draw=partial(draw_images, size=size, classes=10),
        loss=class_loss,
        text=f"ResNet-{50 if scale == 'full' else 18} of torchvision, {batch} x 3 x {size} x {size}",
        is_image_like=True,
    )


def convnext(scale: str) -> Foreign:
    import timm

    name, size, batch = {
        "full": ("convnext_tiny", 224, 128),
        "cpu": ("convnext_atto", 32, 16),
        "tiny": ("convnext_atto", 32, 4),
    }[scale]
    return Foreign(
        net=timm.create_model(name, pretrained=False, num_classes=10),
        batch=batch,
        draw=partial(draw_images, size=size, classes=10),
        loss=class_loss,
        text=f"{name} of timm, {batch} x 3 x {size} x {size}",
        is_image_like=True,
    )


def convnet(scale: str) -> Foreign:
    width, depth, size, batch = {"full": (128, 16, 64, 256), "cpu": (32, 3, 32, 32), "tiny": (4, 1, 8, 4)}[scale]
    return Foreign(
        net=nets.ConvNet(width, depth, classes=10),
        batch=batch,
        draw=partial(draw_images, size=size, classes=10),
        loss=class_loss,
        text=f"residual convolutions with BatchNorm, {depth} blocks of {width}, {batch} x 3 x {size} x {size}",
        is_image_like=True,
    )


def unet(scale: str) -> Foreign:
    width, levels, size, batch = {"full": (64, 4, 256, 32), "cpu": (16, 3, 64, 4), "tiny": (8, 2, 8, 2)}[scale]
    return Foreign(
        net=nets.UNet(width, levels, outputs=4),
        batch=batch,
        draw=partial(draw_images, size=size, classes=4, is_map=True),
        loss=class_loss,
        text=f"U-Net for segmentation, {levels} levels from {width} channels, {batch} x 3 x {size} x {size}",
        is_image_like=True,
    )


def diffusion(scale: str) -> Foreign:
    width, levels, size, batch = {"full": (128, 3, 64, 64), "cpu": (16, 2, 32, 8), "tiny": (8, 2, 8, 2)}[scale]
    return Foreign(
        net=nets.UNet(width, levels, outputs=3, has_time=True),
        batch=batch,
        draw=partial(draw_noise, size=size),
        loss=noise_loss,
        text=f"diffusion step of a U-Net, {levels} levels from {width} channels, {batch} x 3 x {size} x {size}",
        is_image_like=True,
    )


def lstm(scale: str) -> Foreign:
    vocabulary, width, layers, length, batch = {
        "full": (10_000, 1024, 2, 256, 64),
        "cpu": (1_000, 128, 2, 64, 32),
        "tiny": (50, 8, 1, 8, 4),
    }[scale]
    return Foreign(
        net=nets.LstmModel(vocabulary, width, layers),
        batch=batch,
        draw=partial(draw_tokens, vocabulary=vocabulary, length=length + 1),
        loss=token_loss,
        text=f"LSTM language model, {layers} layers of {width}, {batch} x {length} tokens",
    )


def mlp(scale: str) -> Foreign:
    width, depth, batch = {"full": (512, 8, 256), "cpu": (256, 6, 64), "tiny": (16, 2, 8)}[scale]
    return Foreign(
        net=nets.mlp(width, depth, classes=10),
        batch=batch,
        draw=lambda count: {"x": torch.randn(count, width), "y": torch.randint(10, (count,))},
        loss=class_loss,
        text=f"MLP, {depth} x (Linear {width}, GELU, LayerNorm), {batch} samples",
    )


def recommender(scale: str) -> Foreign:
    rows, fields, width, dense, batch = {
        "full": (1_000_000, 26, 64, 13, 4096),
        "cpu": (20_000, 8, 16, 8, 256),
        "tiny": (50, 3, 4, 2, 8),
    }[scale]
    return Foreign(
        net=nets.Recommender(rows, fields, width, dense),
        batch=batch,
        draw=partial(draw_clicks, rows=rows, fields=fields, dense=dense),
        loss=click_loss,
        text=f"recommender, {fields} fields in one table of {rows:,} x {width}, {batch} samples",
    )


MODELS: dict[str, Callable[[str], Foreign]] = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "whisper": whisper,
    "resnet50": resnet50,
    "convnext": convnext,
    "convnet": convnet,
    "unet": unet,
    "diffusion": diffusion,
    "lstm": lstm,
    "mlp": mlp,
    "recommender": recommender,
}
OF_TRANSFORMERS = ("gpt2", "bert", "vit", "whisper")
"""Models that HF Trainer is made for."""
