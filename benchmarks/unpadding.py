"""Time Transformers models with and without the padding of a batch, in pairs of passes in random order.

    python benchmarks/unpadding.py [--pairs 9]

A pass is forward and backward on 16 texts with lengths like SciCite's, one thread. CPU time is compared, which a busy
machine hardly changes.
"""

import argparse
import math
import random
import time

import torch
import transformers
from results import at_least
from torch import Tensor, nn

from whet.autotune.statistics import ratio_interval
from whet.step.unpadding import Unpadding

VOCABULARY, TEXTS = 1000, 16


def models() -> dict[str, nn.Module]:
    shape = {"vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    gpt2 = {"vocab_size": VOCABULARY, "n_embd": 256, "n_layer": 4, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
    return {
        "BERT": transformers.BertForSequenceClassification(
            transformers.BertConfig(**shape, intermediate_size=1024, num_labels=6)
        ),
        "GPT-2": transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "Llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, intermediate_size=688)),
    }


def batch(model: nn.Module, length: int | None) -> dict[str, Tensor]:
    lengths = (46.9 + 25.5 * torch.randn(TEXTS, generator=torch.Generator().manual_seed(0))).clamp(8, 128).long()
    mask = (torch.arange(length or int(lengths.max())) < lengths[:, None]).long()
    ids = torch.randint(1, VOCABULARY, mask.shape) * mask
    is_causal = isinstance(model, transformers.GenerationMixin)
    labels = ids.masked_fill(mask == 0, -100) if is_causal else torch.randint(0, 6, (TEXTS,))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=at_least(2), default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    print("| model | padded to | real tokens | as fast, 95 % interval |\n| --- | ---: | ---: | ---: |")
    for name, model in models().items():
        for length in (None, 128):
            data, unpadding = batch(model.train(), length), Unpadding(model)

            def padded(model: nn.Module = model, data: dict[str, Tensor] = data) -> float:
                start = time.process_time()
                model(**data).loss.backward()
                model.zero_grad()
                return time.process_time() - start

            def unpadded(unpadding: Unpadding = unpadding, padded=padded) -> float:
                with unpadding.in_use():
                    return padded()

            padded(), unpadded()
            logs = []
            for _ in range(given.pairs):
                first = rng.random() < 0.5
                ours, theirs = (unpadded(), padded()) if first else (padded(), unpadded())[::-1]
                logs.append(math.log(ours / theirs))
            gain, share = ratio_interval(logs), float(data["attention_mask"].float().mean())
            times = f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})"
            print(f"| {name} | {length or 'the longest'} | {share:.2f} | {times} |", flush=True)


if __name__ == "__main__":
    main()
