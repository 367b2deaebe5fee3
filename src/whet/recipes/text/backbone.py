"""Locate a pretrained model and read its sizes from config.json, without torch or transformers.

Only safetensors weights, JSON and vocabulary files are downloaded or read. No code from a model is executed.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.base.extras import install_hint
from whet.recipes.hub import explain_hub_error

SMALL = "small"
"""The value of `model` that selects the small encoder, which is trained from scratch."""
LINEAR = "linear"
"""The value of `model` that selects the linear classifier of n-grams."""

BERT_ACTIVATIONS = {
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", "none"),
}
"""Maps the names of activations in transformers to torch's function and the approximation of GELU."""

_BERT_TYPES = ("bert", "camembert", "roberta", "xlm-roberta")
_POSITIONS_AFTER_PADDING = (
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "layoutlmv3",
    "lilt",
    "longformer",
    "luke",
    "markuplm",
    "mpnet",
    "xmod",
)
"""Model types whose position ids start after the padding index, like all types with "roberta" in their name."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
# Maximum size of a safetensors header, close to the limit of the library. It bounds the memory for a damaged file.
_MAX_HEADER_BYTES = 100 * 1024**2
_DOWNLOADED_FILES = (
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backbone:
    """The sizes of a pretrained encoder. `kind` is its `model_type` in transformers."""

    kind: str
    width: int
    layers: int
    heads: int
    inner: int
    vocab_size: int
    num_positions: int
    num_segments: int
    num_stored: int | None = None
    """The number of parameters in the safetensors files; None if they are not on this machine."""
    padding: int = 1
    """The id of the padding token."""
    activation: str = "gelu"
    is_plain: bool = True
    """Whether the model is an encoder with learned absolute positions."""

    @property
    def is_read_packed(self) -> bool:
        """Whether `bert.py` implements this architecture without padding."""
        is_known = self.kind in _BERT_TYPES and self.activation in BERT_ACTIVATIONS and self.num_segments > 0
        return is_known and self.is_plain and self.width % self.heads == 0

    @property
    def max_tokens(self) -> int:
        """The maximum length of a text. RoBERTa-like models use only the positions after their padding index."""
        if "roberta" not in self.kind and self.kind not in _POSITIONS_AFTER_PADDING:
            return self.num_positions
        # MPNet uses 1 as its padding index, regardless of its config.
        return max(1, self.num_positions - max(1, self.padding) - 1)

    def num_parameters(self, *, num_classes: int) -> int:
        """Return the number of parameters, including a classification head.

        For BERT, it is computed from the sizes. For other models, it is read from local files, if there are any.
        """
        width = self.width
        head = (width + 1) * num_classes
        if self.kind != "bert" and self.num_stored is not None:
            return self.num_stored + head
        return self._embeddings + self.layers * self._block + (width + 1) * width + head

    def num_trained(self, *, num_classes: int, freeze: str | int, lora: int | None) -> int:
        """Return the number of trained parameters, including those of LoRA. Exact for BERT, else an estimate."""
        width = self.width
        head = (width + 1) * num_classes
        if lora is not None:
            # peft adds two low-rank matrices to the queries and two to the values of each layer.
            return self.layers * 2 * 2 * lora * width + head
        total = self.num_parameters(num_classes=num_classes)
        if freeze == "none":
            return total
        num_frozen = {"embeddings": 0, "encoder": self.layers}.get(str(freeze), freeze)
        assert isinstance(num_frozen, int)
        return max(head, total - self._embeddings - num_frozen * self._block)

    @property
    def _embeddings(self) -> int:
        """Return the number of parameters of BERT's embeddings and their norm."""
        return (self.vocab_size + self.num_positions + self.num_segments + 2) * self.width

    @property
    def _block(self) -> int:
        """Return the number of parameters of one BERT layer."""
        width = self.width
        return 4 * (width + 1) * width + (width + 1) * self.inner + (self.inner + 1) * width + 4 * width

    def activation_bytes(self, max_length: int) -> int:
        """Return the float32 bytes that one text of full length keeps for the backward pass (see config.py)."""
        block = (34 + 8 * self.inner // self.width) * max_length * self.width + 9 * self.heads * max_length**2
        return self.layers * block + 8 * max_length * self.width


BERT_BASE = Backbone(
    kind="bert", width=768, layers=12, heads=12, inner=3072, vocab_size=30_522, num_positions=512, num_segments=2
)
"""The most common size on the hub. Assumed if the config.json of a model is not on this machine."""


# --- sizes ------------------------------------------------------------------------------------------------------------


def local_folder(name: str) -> Path | None:
    """Return the folder that `model` names, or None for a name on the hub.

    >>> local_folder("allenai/scibert_scivocab_uncased") is None
    True
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(
                "the model's folder has no config.json",
                got=f"model={name}",
                try_="a folder written by save_pretrained",
            )
        return path
    if name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise UsageError(
            "no such model", got=f"model={name}", try_="a folder with config.json and model.safetensors, or model=small"
        )
    return None


def read_backbone(name: str) -> Backbone:
    """Read the sizes of `model` from its folder. For a name on the hub, return those of BERT base."""
    folder = local_folder(name)
    if folder is None:
        return BERT_BASE
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            "cannot read the model's config.json", got=f"{folder}: {error}", try_="a complete copy of the folder"
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(
            "the model's config.json has no model_type", got=str(folder), try_="a folder written by save_pretrained"
        )
    return backbone_of(config, num_stored=_num_stored(folder))


def backbone_of(config: Mapping[str, Any], *, num_stored: int | None = None) -> Backbone:
    """Read the sizes from a transformers config. The keys differ between architectures."""

    def size(*names: str, default: int) -> int:
        return next((int(config[name]) for name in names if isinstance(config.get(name), int)), default)

    width = max(1, size("hidden_size", "dim", "d_model", "n_embd", default=BERT_BASE.width))
    return Backbone(
        kind=config["model_type"],
        width=width,
        layers=size("num_hidden_layers", "n_layers", "num_layers", "n_layer", default=BERT_BASE.layers),
        heads=size("num_attention_heads", "n_heads", "num_heads", "n_head", default=BERT_BASE.heads),
        inner=size("intermediate_size", "hidden_dim", "d_ff", default=4 * width),
        vocab_size=size("vocab_size", default=BERT_BASE.vocab_size),
        num_positions=size("max_position_embeddings", "n_positions", default=BERT_BASE.num_positions),
        num_segments=size("type_vocab_size", default=1),
        num_stored=num_stored,
        padding=size("pad_token_id", default=1),
        activation=str(config.get("hidden_act", "gelu")),
        is_plain=not config.get("is_decoder") and config.get("position_embedding_type", "absolute") == "absolute",
    )


def _num_stored(folder: Path) -> int | None:
    """Count the parameters in safetensors files. A header consists of its length in eight bytes, then JSON."""
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(size, _MAX_HEADER_BYTES)))
            shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
            total += sum(math.prod(shape) for shape in shapes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return total or None


# --- files ------------------------------------------------------------------------------------------------------------


def import_transformers() -> Any:
    """Import transformers, or raise an error that names the extra to install."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "a pretrained model needs the 'text' extra", got=str(error), try_=f"{install_hint('text')}, or model=small"
        ) from None
    return transformers


def model_folder(name: str) -> Path:
    """Return the folder with the files of `model`. Download a hub model if it is not in the cache."""
    folder = local_folder(name) or _download(name)
    if not any(folder.glob("*.safetensors")):
        raise UsageError(
            "the model has no safetensors weights, the only supported format",
            got=f"model={name}",
            try_="NAME@refs/pr/N where the hub offers a conversion; or a folder with model.safetensors",
        )
    return folder


def _download(name: str) -> Path:
    import_transformers()
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")

    def snapshot(*, is_local: bool) -> Path:
        path = snapshot_download(
            repo, revision=revision or None, allow_patterns=list(_DOWNLOADED_FILES), local_files_only=is_local
        )
        return Path(path)

    # Try the cache first, so that a downloaded model needs no network.
    with contextlib.suppress(Exception):
        cached = snapshot(is_local=True)
        # Check the files: an interrupted download leaves a snapshot without weights.
        if (cached / "config.json").is_file() and any(cached.glob("*.safetensors")):
            return cached
    try:
        return snapshot(is_local=False)
    except Exception as error:  # Many types of errors are possible: no network, unknown name, no permission, full disk.
        what, detail = explain_hub_error(error)
        raise WhetError(
            f"there is no folder {repo}, and {what}",
            got=f"model={name}, looked up on the hub: {detail}",
            try_="model=FOLDER, a copy with config.json, model.safetensors and tokenizer.json; or model=small",
        ) from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the messages and progress bars of transformers. whet reports the relevant problems as errors."""
    logging = import_transformers().utils.logging
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
