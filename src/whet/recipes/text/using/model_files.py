"""Which files make a trained classifier usable without whet? A folder for transformers, or one with an ONNX file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError
from whet.recipes.text.choosing import kept_tokenizer
from whet.recipes.text.pretrained_tokenizer import PretrainedTokenizer, write_files

if TYPE_CHECKING:
    from whet.recipes.text.choosing import Classifier


def write_model_files(model: "Classifier", kept: dict[str, Any], folder: Path, *, to: str) -> dict[str, Any]:
    """Writes the files into an empty folder; what a reader of them should know."""
    tokenizer = kept_tokenizer(kept)
    told = {"classes": kept["classes"], "max_length": kept["max_length"], "is_multi_label": kept.get("is_multi_label")}
    if to == "transformers":
        if not isinstance(tokenizer, PretrainedTokenizer):
            raise UsageError(
                "the small encoder is no model of transformers",
                got="a run of model=small",
                try_="--to onnx; or a run of model=FOLDER",
            )
        from whet.recipes.text.model import Encoder
        from whet.recipes.text.pretrained import save_transformers

        assert not isinstance(model, Encoder)
        save_transformers(model, tokenizer, folder)
        return told
    from whet.recipes.text.using.onnx_files import save_onnx

    inputs = save_onnx(model, folder, max_length=int(kept["max_length"]), vocab_size=tokenizer.vocab_size)
    if isinstance(tokenizer, PretrainedTokenizer):
        write_files(tokenizer.files, folder)
    else:
        write_files({"tokenizer.json": tokenizer.to_json()}, folder)
    return {**told, "inputs": inputs, "outputs": ["logits"], "softmax": not kept.get("is_multi_label")}
