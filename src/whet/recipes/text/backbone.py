"""Locate a pretrained model and read its sizes from config.json, without torch or transformers."""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.recipes.hub import explain_hub_error

_BERT_TYPES = ("bert", "camembert", "roberta", "xlm-roberta")
BERT_ACTIVATIONS = {
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", "none"),
}
"""What BERTs compute between two linear layers, by the names of transformers, as torch says it."""

SMALL = "small"
"""The word for the encoder that is trained from scratch."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
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
"""Besides all that have "roberta" in their name."""
_HEADER_BYTES = 100 * 1024**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Backbone:
    """The sizes of a pretrained encoder."""

    kind: str
    width: int
    layers: int
    heads: int
    inner: int
    vocab_size: int
    num_positions: int
    num_segments: int
    num_stored: int | None = None
    """Numbers in its safetensors files, where they lie here."""
    padding: int = 1
    """The number of the token that fills up."""
    activation: str = "gelu"
    is_plain: bool = True
    """An encoder whose positions are learned one by one."""

    @property
    def is_read_packed(self) -> bool:
        """Whether our own execution knows this architecture (`bert.py`), which needs no padding."""
        is_known = self.kind in _BERT_TYPES and self.activation in BERT_ACTIVATIONS and self.num_segments > 0
        return is_known and self.is_plain and self.width % self.heads == 0

    @property
    def most_tokens(self) -> int:
        """Tokens that have a position; RoBERTa's relatives begin to count behind their padding."""
        if "roberta" not in self.kind and self.kind not in _POSITIONS_AFTER_PADDING:
            return self.num_positions
        # MPNet takes 1 for its padding whatever its config says.
        return max(1, self.num_positions - max(1, self.padding) - 1)

    def num_parameters(self, *, num_classes: int) -> int:
        """With the head of a classifier: BERT's own layers counted, others as many as their files hold."""
        width = self.width
        head = (width + 1) * num_classes
        if self.kind != "bert" and self.num_stored is not None:
            return self.num_stored + head
        embeddings = (self.vocab_size + self.num_positions + self.num_segments + 2) * width
        return embeddings + self.layers * self._block + (width + 1) * width + head

    def num_trained(self, *, num_classes: int, freeze: str | int, lora: int | None) -> int:
        """How many of them learn; LoRA's own numbers too. As BERT's layers are, about so for others."""
        width = self.width
        head = (width + 1) * num_classes
        if lora is not None:
            # peft puts two thin matrices beside the queries and two beside the values of each layer.
            return self.layers * 2 * 2 * lora * width + head
        whole = self.num_parameters(num_classes=num_classes)
        if freeze == "none":
            return whole
        num_frozen = {"embeddings": 0, "encoder": self.layers}.get(str(freeze), freeze)
        assert isinstance(num_frozen, int)
        stays = (self.vocab_size + self.num_positions + self.num_segments + 2) * width + num_frozen * self._block
        return max(head, whole - stays)

    @property
    def _block(self) -> int:
        """The parameters of one layer of BERT."""
        width = self.width
        return 4 * (width + 1) * width + (width + 1) * self.inner + (self.inner + 1) * width + 4 * width

    def activation_bytes(self, max_length: int) -> int:
        """What one text of full length keeps for the backward pass in float32; counted as for the small encoder."""
        block = (34 + 8 * self.inner // self.width) * max_length * self.width + 9 * self.heads * max_length**2
        return self.layers * block + 8 * max_length * self.width


BERT_BASE = Backbone(
    kind="bert", width=768, layers=12, heads=12, inner=3072, vocab_size=30_522, num_positions=512, num_segments=2
)
"""What most encoders on the hub are like: taken where a model's config.json does not lie on this machine yet."""


def local_folder(word: str) -> Path | None:
    """The folder that `model=` names; None for a name on the hub. Something else is refused.

    >>> folder_of("allenai/scibert_scivocab_uncased") is None
    True
    """
    path = Path(word).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(
                "the model's folder has no config.json", got=f"model={word}", try_="a folder that save_pretrained wrote"
            )
        return path
    if word.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(word):
        raise UsageError(
            "no such model", got=f"model={word}", try_="a folder with config.json and model.safetensors, or model=small"
        )
    return None


def read_backbone(word: str) -> Backbone:
    """The sizes behind `model=`; BERT base where they are not on this machine."""
    folder = local_folder(word)
    if folder is None:
        return BERT_BASE
    try:
        written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            "the model's config.json cannot be read", got=f"{folder}: {error}", try_="a whole copy of the folder"
        ) from None
    if not isinstance(written, dict) or not isinstance(written.get("model_type"), str):
        raise UsageError(
            "the model's config.json does not say what it is", got=str(folder), try_="one with a model_type"
        )
    return backbone_of(written, num_stored=_num_stored(folder))


def backbone_of(written: Mapping[str, Any], *, num_stored: int | None = None) -> Backbone:
    """What a model's config says, by the names that encoders have for it."""

    def size(*names: str, otherwise: int) -> int:
        return next((int(written[name]) for name in names if isinstance(written.get(name), int)), otherwise)

    width = max(1, size("hidden_size", "dim", "d_model", "n_embd", otherwise=BERT_BASE.width))
    return Backbone(
        kind=written["model_type"],
        width=width,
        layers=size("num_hidden_layers", "n_layers", "num_layers", "n_layer", otherwise=BERT_BASE.layers),
        heads=size("num_attention_heads", "n_heads", "num_heads", "n_head", otherwise=BERT_BASE.heads),
        inner=size("intermediate_size", "hidden_dim", "d_ff", otherwise=4 * width),
        vocab_size=size("vocab_size", otherwise=BERT_BASE.vocab_size),
        num_positions=size("max_position_embeddings", "n_positions", otherwise=BERT_BASE.num_positions),
        num_segments=size("type_vocab_size", otherwise=1),
        num_stored=num_stored,
        padding=size("pad_token_id", otherwise=1),
        activation=str(written.get("hidden_act", "gelu")),
        is_plain=not written.get("is_decoder") and written.get("position_embedding_type", "absolute") == "absolute",
    )


def _num_stored(folder: Path) -> int | None:
    """What the headers of safetensors files say: eight bytes of length, then JSON."""
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as stream:
                size = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(size, _HEADER_BYTES)))
            shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
            total += sum(math.prod(shape) for shape in shapes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return total or None


DOWNLOADED_FILES = (
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
_TRY_FOLDER = "model=FOLDER, a copy with config.json, model.safetensors and tokenizer.json; or model=small"


def import_transformers() -> Any:
    """transformers, or a word about the extra that brings it."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "a pretrained model needs the extra text", got=str(error), try_="pip install 'whet[text]', or model=small"
        ) from None
    return transformers


def model_folder(word: str) -> Path:
    """Where the files of `model=` lie; a name on the hub is looked up in its cache first."""
    folder = local_folder(word) or _download(word)
    if not any(folder.glob("*.safetensors")):
        raise UsageError(
            "the model has no weights as safetensors, and no other form is read",
            got=f"model={word}",
            try_="NAME@refs/pr/N where the hub offers a conversion; or a folder with model.safetensors",
        )
    return folder


def _download(word: str) -> Path:
    import_transformers()
    from huggingface_hub import snapshot_download

    name, _, revision = word.partition("@")

    def ask(*, is_local: bool) -> Path:
        found = snapshot_download(
            name, revision=revision or None, allow_patterns=list(DOWNLOADED_FILES), local_files_only=is_local
        )
        return Path(found)

    with contextlib.suppress(Exception):
        here = ask(is_local=True)
        # A cache may hold a part of a model only.
        if (here / "config.json").is_file() and any(here.glob("*.safetensors")):
            return here
    try:
        return ask(is_local=False)
    except Exception as error:  # Many kinds: no network, no such name, no leave to read it, a full disk.
        what, detail = explain_hub_error(error)
        raise WhetError(
            f"no folder {name} is here, and {what}",
            got=f"model={word}, looked up on the hub since it may be a name there: {detail}",
            try_=_TRY_FOLDER,
        ) from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers without its reports and progress bars: what matters in them is told by us."""
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
