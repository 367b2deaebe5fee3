"""Export a trained classifier as a transformers folder or an ONNX file.

Shapes: B texts, L tokens of the longest text, C classes; B and L are dynamic in the ONNX file.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from whet.base.errors import UsageError, WhetError, first_line
from whet.base.extras import install_hint
from whet.data.batch import Padded
from whet.recipes.text.factory import load_tokenizer
from whet.recipes.text.model import Encoder
from whet.recipes.text.ngrams import NgramClassifier
from whet.recipes.text.pretrained import as_pretrained, merge_lora, save_transformers
from whet.recipes.text.tokenizer import PretrainedTokenizer, write_files

if TYPE_CHECKING:
    from whet.recipes.text.factory import Classifier

ONNX_FILE: Final = "model.onnx"
_OPSET: Final = 20
_TOLERANCE: Final = 1e-3
"""The tolerance for logits: onnx's reference evaluator uses numpy, with a different implementation of erf."""


def write_model_files(model: "Classifier", metadata: dict[str, Any], folder: Path, *, to: str) -> dict[str, Any]:
    """Write the model and its tokenizer into an empty folder, and return the facts for the export manifest."""
    tokenizer = load_tokenizer(metadata)
    facts = {
        "classes": metadata["classes"],
        "max_length": metadata["max_length"],
        "is_multi_label": metadata.get("is_multi_label"),
    }
    if to == "transformers":
        if not isinstance(tokenizer, PretrainedTokenizer):
            raise UsageError(
                "the model is not a Transformers model",
                got="a run of model=linear or model=small",
                try_="--to onnx; or a run of model=FOLDER",
            )
        assert not isinstance(model, Encoder | NgramClassifier)
        save_transformers(model, tokenizer, folder)
        return facts
    inputs = save_onnx(model, folder, max_length=int(metadata["max_length"]), vocab_size=tokenizer.vocab_size)
    if isinstance(tokenizer, PretrainedTokenizer):
        write_files(tokenizer.files, folder)
    else:
        write_files({"tokenizer.json": tokenizer.to_json()}, folder)
    return {**facts, "inputs": inputs, "outputs": ["logits"], "softmax": not metadata.get("is_multi_label")}


def save_onnx(model: "Classifier", folder: Path, *, max_length: int, vocab_size: int) -> list[str]:
    """Write `model.onnx`, check that it computes the same logits, and return the names of its inputs."""
    check_onnx_installed()
    network, names = _with_onnx_inputs(model)
    # Use two texts, because torch.export specializes dimensions of size 1.
    sample = _sample_inputs(names, num_texts=2, length=min(8, max_length), vocab_size=vocab_size)
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=max(2, max_length))}
    with _quiet_exporter():
        try:
            program = torch.onnx.export(
                network,
                (),
                kwargs=sample,
                dynamic_shapes=dict.fromkeys(names, dynamic),
                input_names=names,
                output_names=["logits"],
                opset_version=_OPSET,
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            program.save(str(folder / ONNX_FILE))
        except (RuntimeError, ValueError, TypeError) as error:
            raise WhetError(
                "cannot export the model to ONNX", got=first_line(error), try_="--to transformers"
            ) from None
        # Use different sizes than in the export, to check that the shapes are dynamic.
        other = _sample_inputs(names, num_texts=3, length=min(13, max_length), vocab_size=vocab_size)
        _check_same_logits(network, folder / ONNX_FILE, other)
    return names


def check_onnx_installed() -> None:
    """Raise an error that names the extra to install if onnx is missing."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UsageError(
            "exporting to ONNX needs packages that are not installed",
            got=f"no {' and no '.join(missing)}",
            try_=install_hint("onnx"),
        )


class _BuiltInOnnx(nn.Module):
    """A built-in model with the inputs of a transformers model, `input_ids` and `attention_mask`."""

    def __init__(self, encoder: Encoder | NgramClassifier) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.encoder(Padded(values=input_ids, lengths=attention_mask.sum(1)))
        return logits


class _TransformersOnnx(nn.Module):
    """A transformers classifier that returns only its logits."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        logits: Tensor = self.network(input_ids=input_ids, attention_mask=attention_mask, **segments).logits
        return logits


def _with_onnx_inputs(model: "Classifier") -> tuple[nn.Module, list[str]]:
    names = ["input_ids", "attention_mask"]
    if isinstance(model, Encoder | NgramClassifier):
        return _BuiltInOnnx(model).eval(), names
    network = _TransformersOnnx(merge_lora(as_pretrained(model).network)).eval()
    return network, [*names, "token_type_ids"] if model.has_segments else names


def _sample_inputs(names: list[str], *, num_texts: int, length: int, vocab_size: int) -> dict[str, Tensor]:
    """Return a batch of texts of decreasing length."""
    ids = torch.arange(num_texts * length).reshape(num_texts, length) * 7 % max(1, vocab_size - 1) + 1
    lengths = torch.arange(length, length - num_texts, -1).clamp(min=1)
    mask = (torch.arange(length) < lengths[:, None]).long()
    inputs = {"input_ids": torch.where(mask > 0, ids, 0), "attention_mask": mask}
    second_segment = torch.where(torch.arange(length) > length // 2, mask, 0)
    return {name: inputs.get(name, second_segment) for name in names}


def _check_same_logits(network: nn.Module, file: Path, sample: dict[str, Tensor]) -> None:
    evaluator = import_module("onnx.reference").ReferenceEvaluator(str(file))
    (logits,) = evaluator.run(["logits"], {name: tensor.numpy() for name, tensor in sample.items()})
    with torch.no_grad():
        expected = network(**sample)
    difference = float((torch.from_numpy(logits) - expected).abs().max())
    if not difference <= _TOLERANCE:
        raise WhetError(
            "the ONNX file computes different logits than the model",
            got=f"logits differ by {difference:.3g}",
            try_="--to transformers, or another version of torch and onnxscript",
        )


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence the exporter, which warns about its internals and about libraries that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
