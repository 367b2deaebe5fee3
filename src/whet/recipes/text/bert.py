"""How is a BERT classifier computed without padding? The weights of transformers under their names, our execution.

Shapes: B texts, L tokens of the longest, T tokens in all, W width, C classes. Parameters are those of transformers'
classifier, one by one and under its names, so checkpoints, exports and optimizer states are the same whichever of the
two computes. The linear layers and norms see a batch as it comes, (B, L, W) or (T, W). RoBERTa and its relatives are
the same encoder: they count positions from behind their padding, and their head holds what is BERT's pooler.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import Packed, Padded
from whet.device.kernels.residual_norm import residual_layer_norm
from whet.recipes.text.attention import TokenLayout, attend, first_token, token_layout
from whet.recipes.text.backbone import BERT_ACTIVATIONS
from whet.recipes.text.tokenizer import SEGMENT_OFFSET


class Bert(nn.Module):
    """A BERT classifier that reads padded and packed batches alike; `config` is transformers' own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.has_segments = config.type_vocab_size > 1
        is_bert = config.model_type == "bert"
        self._body = "bert" if is_bert else "roberta"
        head = _linear(config, config.num_labels) if is_bert else _RobertaHead(config)
        self.network = nn.ModuleDict({self._body: _BertModel(config), "classifier": head})
        self.dropout = nn.Dropout(_last_dropout(config))

    @classmethod
    def of(cls, network: Any) -> "Bert":
        """The same classifier: it shares the weights of transformers' one."""
        with torch.device("meta"):
            made = cls(network.config)
        made.network.load_state_dict(network.state_dict(), assign=True)
        return made.train(network.training)

    def forward(self, tokens: Padded | Packed) -> Tensor:
        """The logits, (B, C)."""
        found: Tensor = self.network[self._body](tokens, token_layout(tokens))
        logits: Tensor = self.network["classifier"](self.dropout(found))
        return logits


class _BertModel(nn.Module):
    """Embeddings, post-norm blocks, and what the pooler, if there is one, makes of each text's first token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embeddings = _BertEmbeddings(config)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(_BertBlock(config) for _ in range(config.num_hidden_layers))}
        )
        if config.model_type == "bert":
            self.pooler = nn.ModuleDict({"dense": _linear(config, config.hidden_size)})

    def forward(self, tokens: Padded | Packed, layout: TokenLayout) -> Tensor:
        x = whole = self.embeddings(tokens.values, layout)
        for block in self._blocks():
            whole, x = block(whole, x, layout)
        found = first_token(whole, layout)
        return self.pooler["dense"](found).tanh() if hasattr(self, "pooler") else found

    def _blocks(self) -> nn.ModuleList:
        blocks = self.encoder["layer"]
        assert isinstance(blocks, nn.ModuleList)
        return blocks


class _BertEmbeddings(nn.Module):
    """Word, place and segment."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.padding = None if config.model_type == "bert" else int(config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width, padding_idx=self.padding)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, ids: Tensor, layout: TokenLayout) -> Tensor:
        words = ids % SEGMENT_OFFSET
        # Padding may reach beyond the last position that was learned; whatever stands there is never looked at.
        places = self._places(words, layout).clamp(max=self.position_embeddings.num_embeddings - 1)
        if self.token_type_embeddings.num_embeddings > 1:
            segments = self.token_type_embeddings(ids // SEGMENT_OFFSET)
        else:
            segments = self.token_type_embeddings.weight[0]
        seen = self.word_embeddings(words) + segments + self.position_embeddings(places)
        return self.dropout(self.LayerNorm(seen))

    def _places(self, words: Tensor, layout: TokenLayout) -> Tensor:
        """RoBERTa counts from behind its padding's number, and over the padding that stands inside a text."""
        if self.padding is None:
            return layout.positions
        counts = words != self.padding
        total = counts.cumsum(-1)
        if layout.starts is not None:
            first = torch.arange(len(words), device=words.device) - layout.positions
            total = total - (total - counts.long()).index_select(0, first)
        return torch.where(counts, total, 0) + self.padding


class _BertBlock(nn.Module):
    """Attention, then a feed-forward layer; what each adds is normed together with what came in.

    What came in comes twice, as sums and as products need it (`residual_layer_norm`), and leaves so.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.attention_dropout = float(config.attention_probs_dropout_prob)
        self.activation, self.approximate = BERT_ACTIVATIONS[config.hidden_act]
        mixing = nn.ModuleDict({name: _linear(config, width) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": mixing, "output": _ResidualNorm(config, width)})
        self.intermediate = nn.ModuleDict({"dense": _linear(config, config.intermediate_size)})
        self.output = _ResidualNorm(config, config.intermediate_size)

    def forward(self, whole: Tensor, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        dropout = self.attention_dropout if self.training else 0.0
        found = attend(self._mix(x), layout, num_heads=self.num_heads, dropout=dropout)
        whole, x = self.attention["output"](found, whole)
        inner = self.intermediate["dense"](x)
        inner = (
            functional.relu(inner)
            if self.activation == "relu"
            else functional.gelu(inner, approximate=self.approximate)
        )
        added: tuple[Tensor, Tensor] = self.output(inner, whole)
        return added

    def _mix(self, x: Tensor) -> Tensor:
        """Queries, keys and values side by side, 3 W wide: one product instead of three."""
        layers = list(self.attention["self"].children())
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        return functional.linear(x, weight, bias)


class _ResidualNorm(nn.Module):
    """A linear layer whose result is added to what came in before, and normed."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        return residual_layer_norm(self.dense, self.dropout, self.LayerNorm, x, before)


class _RobertaHead(nn.Module):
    """RoBERTa's classifier."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = _linear(config, config.hidden_size)
        self.dropout = nn.Dropout(_last_dropout(config))
        self.out_proj = _linear(config, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out_proj(self.dropout(self.dense(x).tanh()))
        return logits


def _last_dropout(config: Any) -> float:
    share = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return float(share)


def _linear(config: Any, width: int) -> nn.Linear:
    return nn.Linear(config.hidden_size, width)
