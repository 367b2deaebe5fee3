"""A tiny BERT with its own tokenizer, written like save_pretrained does, without a download."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

FILLERS = ["the", "a", "some", "of", "in", "for", "with", "and", "or", "but"]
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven"]
WORDS = [*FILLERS, "fox", "fern", "flint", "red", "green", "blue", *NUMBERS]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NUM_POSITIONS = 24


def write_tiny_bert(folder: Path) -> Path:
    """A folder that AutoModel and AutoTokenizer load."""
    import transformers

    from whet.recipes.text.backbone import quiet_transformers

    folder.mkdir(parents=True)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=NUM_POSITIONS,
        # Large enough that words and halves of a pair matter from the first step on.
        initializer_range=0.3,
    )
    torch.manual_seed(1)
    with quiet_transformers():
        transformers.BertModel(config).save_pretrained(folder)
    engine = Tokenizer(models.WordPiece({word: n for n, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    engine.normalizer = normalizers.BertNormalizer()
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    engine.add_special_tokens(SPECIAL)
    engine.save(str(folder / "tokenizer.json"))
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    logged = {"tokenizer_class": "BertTokenizer", "model_max_length": NUM_POSITIONS, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(logged))
    return folder


def write_rows(file: Path, *, num_rows: int, has_pairs: bool = False) -> Path:
    """Texts of different lengths whose class shows in every other word; some longer than the model has positions."""
    kinds = {"animal": "fox", "plant": "fern", "stone": "flint"}
    rows = []
    for number in range(num_rows):
        label = list(kinds)[number % 3]
        # Eight fillers and 29 lengths, neither divisible by three, so that only these words predict the class.
        words = [WORDS[(number * 5 + place * place) % 8] for place in range(2 + number * 11 % 29)]
        words[number % 2 :: 2] = [kinds[label]] * len(words[number % 2 :: 2])
        row = {"text": " ".join(words) + f" {WORDS[13 + number % 10]}", "label": label}
        if has_pairs:
            row["sentence2"] = " ".join(WORDS[(number * 3 + place) % len(WORDS)] for place in range(1 + number % 7))
        rows.append(json.dumps(row))
    file.write_text("\n".join(rows))
    return file
