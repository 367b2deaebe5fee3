"""BERT and RoBERTa classifiers that also accept packed batches, which have no padding.

Shapes: B texts, L tokens of the longest text, T tokens in total, W width, C classes. The parameters have the names and
shapes of the transformers classifier, so checkpoints, exports and optimizer states are interchangeable. Linear layers
and norms accept both layouts of a batch, (B, L, W) and (T, W). RoBERTa and related models use the same encoder, with
two differences: positions count from the padding index, and the head contains the layer that BERT calls its pooler.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import Packed, Padded
from whet.device.kernels.rowwise import residual_layer_norm
from whet.recipes.text.attention import TokenLayout, attend, first_token, token_layout
from whet.recipes.text.backbone import BERT_ACTIVATIONS
from whet.recipes.text.tokenizer import SEGMENT_OFFSET


class Bert(nn.Module):
    """A BERT classifier for padded and packed batches. `config` is the transformers config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.has_segments = config.type_vocab_size > 1
        is_bert = config.model_type == "bert"
        self._body = "bert" if is_bert else "roberta"
        head = _linear(config, config.num_labels) if is_bert else _RobertaHead(config)
        self.network = nn.ModuleDict({self._body: _BertModel(config), "classifier": head})
        self.dropout = nn.Dropout(_classifier_dropout(config))

    @classmethod
    def of(cls, network: Any) -> "Bert":
        """Convert a transformers classifier. The weights are shared."""
        # Build on the meta device, which allocates no memory for the weights that are then replaced.
        with torch.device("meta"):
            bert = cls(network.config)
        bert.network.load_state_dict(network.state_dict(), assign=True)
        return bert.train(network.training)

    def forward(self, tokens: Padded | Packed) -> Tensor:
        """Return the class logits, (B, C), for a padded or packed batch."""
        pooled: Tensor = self.network[self._body](tokens, token_layout(tokens))
        logits: Tensor = self.network["classifier"](self.dropout(pooled))
        return logits


class _BertModel(nn.Module):
    """Embeddings, post-norm blocks, and BERT's pooler on the first token of each text."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embeddings = _BertEmbeddings(config)
        blocks = nn.ModuleList(_BertBlock(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": blocks})
        if config.model_type == "bert":
            self.pooler = nn.ModuleDict({"dense": _linear(config, config.hidden_size)})

    def forward(self, tokens: Padded | Packed, layout: TokenLayout) -> Tensor:
        x = residual = self.embeddings(tokens.values, layout)
        blocks = self.encoder["layer"]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            residual, x = block(residual, x, layout)
        first = first_token(residual, layout)
        return self.pooler["dense"](first).tanh() if hasattr(self, "pooler") else first


class _BertEmbeddings(nn.Module):
    """Layer norm of the sum of word, position and segment embeddings."""

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
        # The high bits of a token id contain the segment (`tokenizer.py`).
        words = ids % SEGMENT_OFFSET
        # Clamp: padding may extend beyond the last learned position, but no token attends to it.
        positions = self._positions(words, layout).clamp(max=self.position_embeddings.num_embeddings - 1)
        if self.token_type_embeddings.num_embeddings > 1:
            segments = self.token_type_embeddings(ids // SEGMENT_OFFSET)
        else:
            # RoBERTa has a single segment: broadcasting its embedding saves a lookup per token.
            segments = self.token_type_embeddings.weight[0]
        embedded = self.word_embeddings(words) + segments + self.position_embeddings(positions)
        return self.dropout(self.LayerNorm(embedded))

    def _positions(self, words: Tensor, layout: TokenLayout) -> Tensor:
        """Return the position ids. RoBERTa starts after its padding index and does not count padding tokens."""
        if self.padding is None:
            return layout.positions
        is_counted = words != self.padding
        total = is_counted.cumsum(-1)
        if layout.starts is not None:
            # The cumulative sum spans the whole batch: subtract its value before each text.
            first = torch.arange(len(words), device=words.device) - layout.positions
            total = total - (total - is_counted.long()).index_select(0, first)
        return torch.where(is_counted, total, 0) + self.padding


class _BertBlock(nn.Module):
    """Post-norm attention and feed-forward layer, each with a residual connection.

    A block takes and returns two tensors: the residual, and the input of the next matrix product, which may have a
    lower precision (`residual_layer_norm`).
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.attention_dropout = float(config.attention_probs_dropout_prob)
        self.activation, self.approximate = BERT_ACTIVATIONS[config.hidden_act]
        qkv = nn.ModuleDict({name: _linear(config, width) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": qkv, "output": _ResidualNorm(config, width)})
        self.intermediate = nn.ModuleDict({"dense": _linear(config, config.intermediate_size)})
        self.output = _ResidualNorm(config, config.intermediate_size)

    def forward(self, residual: Tensor, x: Tensor, layout: TokenLayout) -> tuple[Tensor, Tensor]:
        dropout = self.attention_dropout if self.training else 0.0
        attended = attend(self._qkv(x), layout, num_heads=self.num_heads, dropout=dropout)
        residual, x = self.attention["output"](attended, residual)
        inner = self.intermediate["dense"](x)
        inner = (
            functional.relu(inner)
            if self.activation == "relu"
            else functional.gelu(inner, approximate=self.approximate)
        )
        out: tuple[Tensor, Tensor] = self.output(inner, residual)
        return out

    def _qkv(self, x: Tensor) -> Tensor:
        """Return queries, keys and values side by side, 3 W wide: one matrix product instead of three."""
        # Concatenate in every pass: checkpoints and exports need separate parameters, as in transformers.
        layers = list(self.attention["self"].children())
        weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
        return functional.linear(x, weight, bias)


class _ResidualNorm(nn.Module):
    """Linear layer, dropout, residual sum and layer norm."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return residual_layer_norm(self.dense, self.dropout, self.LayerNorm, x, residual)


class _RobertaHead(nn.Module):
    """RoBERTa's classification head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = _linear(config, config.hidden_size)
        self.dropout = nn.Dropout(_classifier_dropout(config))
        self.out_proj = _linear(config, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out_proj(self.dropout(self.dense(x).tanh()))
        return logits


def _classifier_dropout(config: Any) -> float:
    dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return float(dropout)


def _linear(config: Any, width: int) -> nn.Linear:
    return nn.Linear(config.hidden_size, width)
