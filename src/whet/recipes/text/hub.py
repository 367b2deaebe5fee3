"""How does a pretrained model come to this machine? It lies in a folder, or the hub is asked once.

Nothing but weights as safetensors, JSON and vocabularies is fetched or read, and no code of a model is run.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.recipes.hub_words import why_not
from whet.recipes.text.backbone import folder_of

WANTED = (
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
WAY_OUT = "model=FOLDER, a copy with config.json, model.safetensors and tokenizer.json; or model=small"


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
    folder = folder_of(word) or _from_hub(word)
    if not any(folder.glob("*.safetensors")):
        raise UsageError(
            "the model has no weights as safetensors, and no other form is read",
            got=f"model={word}",
            try_="NAME@refs/pr/N where the hub offers a conversion; or a folder with model.safetensors",
        )
    return folder


def _from_hub(word: str) -> Path:
    import_transformers()
    from huggingface_hub import snapshot_download

    name, _, revision = word.partition("@")

    def ask(*, is_local: bool) -> Path:
        found = snapshot_download(
            name, revision=revision or None, allow_patterns=list(WANTED), local_files_only=is_local
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
        what, detail = why_not(error)
        raise WhetError(
            f"no folder {name} is here, and {what}",
            got=f"model={word}, looked up on the hub since it may be a name there: {detail}",
            try_=WAY_OUT,
        ) from None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
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
