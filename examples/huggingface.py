"""Fine-tune a Transformers model: a dataset of token lists, a collator that pads, and `model(**batch)`.

The model is made from a config, so nothing is downloaded. Replace `make_model` by
`AutoModelForSequenceClassification.from_pretrained(NAME)`, and `Pad` by `DataCollatorWithPadding(tokenizer)`.

python examples/huggingface.py runs/huggingface
"""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import whet

EPOCHS, PAD = 3, 0


def make_model():
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=2,
        pad_token_id=PAD,
    )
    return BertForSequenceClassification(config)


def make_dataset(size, *, seed):
    """Return texts of 4 to 20 tokens. The label is whether token 7 occurs."""
    draw = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(size):
        tokens = torch.randint(8, 50, (int(torch.randint(4, 21, (), generator=draw)),), generator=draw).tolist()
        if index % 2:
            tokens[int(torch.randint(0, len(tokens), (), generator=draw))] = 7
        samples.append({"input_ids": tokens, "label": index % 2})
    return samples


class Pad:
    """Pads the texts of a batch to the longest, as DataCollatorWithPadding does. It is called once per batch."""

    def __call__(self, samples):
        tokens = [torch.tensor(sample["input_ids"]) for sample in samples]
        input_ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=PAD)
        labels = torch.tensor([sample["label"] for sample in samples])
        return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": labels}


def accuracy(model, batches):
    is_correct = [(model(**batch).logits.argmax(1) == batch["labels"]).float() for batch in batches]
    return {"accuracy": torch.cat(is_correct).mean()}


def main(run):
    loader = DataLoader(make_dataset(640, seed=0), batch_size=16, shuffle=True, collate_fn=Pad())
    val_loader = DataLoader(make_dataset(200, seed=1), batch_size=50, collate_fn=Pad())
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    num_steps = EPOCHS * len(loader)

    result = whet.train(
        model,
        loader,
        loss=lambda batch: model(**batch),  # an output with .loss, the mean over the texts of the batch
        optimizer=optimizer,
        schedule=get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps),
        schedule_interval="step",
        clip=1.0,
        val=val_loader,
        evaluate=accuracy,
        goal="accuracy",
        epochs=EPOCHS,
        run=run,
    )
    print(f"{result.reason}: accuracy {result.metrics['accuracy']:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/huggingface")
