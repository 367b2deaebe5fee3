"""Sequences of different lengths with a mean over tokens: the loss returns a pair (sum, weight).

However whet splits and pads the global batch, the optimizer step is the same.

python examples/by_feature/token_weights.py
"""

import torch
from torch import nn

import whet
from whet.data.batch import Ragged

draw = torch.Generator().manual_seed(0)
lengths = torch.randint(2, 20, (400,), generator=draw).tolist()
sentences = Ragged.of([torch.randint(1, 50, (length,), generator=draw).sort().values for length in lengths])

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))


def next_token_loss(micro):
    tokens = micro.tokens
    logits = model(tokens.values[:, :-1])
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), tokens.values[:, 1:], reduction="none")
    is_token = torch.arange(1, tokens.values.shape[1]) < tokens.lengths[:, None]
    return (losses * is_token).sum(), is_token.sum()


for micro_batch in (16, 5):
    torch.manual_seed(0)
    for layer in model:
        layer.reset_parameters()
    whet.train(
        model,
        {"tokens": sentences},
        loss=next_token_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        global_batch_size=16,
        epochs=2,
        overrides={"micro_batch": micro_batch, "device": "cpu"},
    )
    print(f"micro-batch {micro_batch:2}: sum of weights {sum(p.sum().item() for p in model.parameters()):.4f}")
