"""Run the blocks of a Transformers model on only the real tokens of a padded batch.

The user's call does not change: padded `input_ids` and `attention_mask` go in, padded hidden states come out. In
between, the blocks process a single row of all real tokens, because everything in them except attention treats each
token separately. Attention, which transformers calls through its public `AttentionInterface`, is computed separately
for each text. After the last block, padding positions are filled with zeros. The model and its config are not changed;
hooks and the registered attention function are removed afterward. `verify/start/compiled.py` compares loss and
gradients with those of the padded batch.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError

_ATTENTION = "sdpa"
"""The attention implementation that is replaced, which is the default of transformers."""
NO_TRANSFORMER = "it is not a Transformers model"
_MIN_PADDING = 0.1
"""Batches with a smaller share of padding stay padded: packing them would cost as much as it saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Positions of the real tokens of a batch: B texts padded to L tokens, with T real tokens in total."""

    shape: tuple[int, int]
    """(B, L)."""
    cells: Tensor
    """(T): the index of each real token in the flattened padded batch."""
    places: Tensor
    """(T): the index of each real token in the flattened B x `longest` rectangle."""
    longest: int
    is_key: Tensor
    """(B, 1, 1, longest): which positions of that rectangle hold real tokens."""

    @classmethod
    def of(cls, attention_mask: Tensor) -> "_Layout | None":
        """Return the layout; None if there is too little padding, a text is empty, or padding precedes a token."""
        is_real = attention_mask != 0
        lengths = is_real.sum(1)
        if int(lengths.sum()) > (1 - _MIN_PADDING) * is_real.numel() or not bool(lengths.all()):
            return None
        cells = is_real.flatten().nonzero().squeeze(1)
        longest = int(lengths.max())
        texts, columns = cells // is_real.shape[1], cells % is_real.shape[1]
        is_key = torch.arange(longest, device=cells.device) < lengths[:, None]
        if not torch.equal(is_key, is_real[:, :longest]):
            # The batch is padded on the left, and the loss of a causal model reads the padding before the first token.
            return None
        return cls(
            shape=(is_real.shape[0], is_real.shape[1]),
            cells=cells,
            places=texts * longest + columns,
            longest=longest,
            is_key=is_key[:, None, None],
        )

    def pack(self, x: Tensor) -> Tensor:
        """Pack a tensor of shape (B, L, ...) or (1, L, ...) to (1, T, ...)."""
        return x.expand(*self.shape, *x.shape[2:]).flatten(0, 1).index_select(0, self.cells)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Unpack a tensor of shape (1, T, ...) to (B, L, ...), with zeros for padding."""
        rows = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return rows.index_copy(0, self.cells, x[0]).unflatten(0, self.shape)

    def to_rectangle(self, x: Tensor) -> Tensor:
        """Rearrange a tensor of shape (1, heads, T, width) to (B, heads, longest, width)."""
        rows = x.new_zeros(self.shape[0] * self.longest, x.shape[1], x.shape[3])
        rows = rows.index_copy(0, self.places, x[0].transpose(0, 1))
        return rows.unflatten(0, (self.shape[0], self.longest)).transpose(1, 2)

    def from_rectangle(self, x: Tensor) -> Tensor:
        """Rearrange a tensor of shape (B, longest, heads, width) to (1, T, heads, width)."""
        return x.flatten(0, 1).index_select(0, self.places)[None]


class UnpaddingError(WhetError):
    """Raised if a block of a model gets an argument that cannot be packed."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            "this model cannot be computed without padding", got=reason, try_='overrides={"lengths": "fixed"}'
        )


def unpadding_obstacle(model: nn.Module) -> str | None:
    """Return why the blocks of a model cannot skip padding; None if there is no known reason."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return NO_TRANSFORMER
    models = list(_outermost_pretrained(model, modeling.PreTrainedModel))
    if len(models) != 1:
        return NO_TRANSFORMER if not models else "it has several Transformers models"
    (pretrained,) = models
    if "attention_mask" not in inspect.signature(pretrained.forward).parameters:
        return "it takes no attention_mask"
    config = pretrained.config
    if getattr(config, "is_encoder_decoder", False):
        return "its encoder and decoder have separate lengths"
    if getattr(config, "_attn_implementation", None) != _ATTENTION:
        return (
            f"its attention is {getattr(config, '_attn_implementation', None)}, and only {_ATTENTION} can be replaced"
        )
    if pretrained.is_gradient_checkpointing:
        return "its own gradient checkpointing recomputes blocks in the backward pass"
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        return "it returns hidden states or attention weights"
    if any(getattr(owner, "sliding_window", None) is not None for owner in (config, *pretrained.modules())):
        return "its attention has a sliding window"
    if any(isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase) for module in pretrained.modules()):
        return "it has layers that mix neighboring tokens"
    if not _blocks(pretrained):
        return "its blocks were not found"
    return None


def _outermost_pretrained(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    if isinstance(module, kind):
        yield module
        return
    for child in module.children():
        yield from _outermost_pretrained(child, kind)


def _blocks(pretrained: nn.Module) -> list[nn.Module]:
    """Return the blocks, in order: the only list whose length is the number of layers in the config."""
    count = getattr(pretrained.config, "num_hidden_layers", None)
    lists = [module for module in pretrained.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if len(lists) != 1 or len({type(block) for block in lists[0]}) != 1:
        return []
    return list(lists[0])


class Unpadding:
    """Hooks that make the blocks of a model skip padding inside `in_use`."""

    def __init__(self, model: nn.Module) -> None:
        modeling = sys.modules["transformers.modeling_utils"]
        (pretrained,) = _outermost_pretrained(model, modeling.PreTrainedModel)
        self._interface = modeling.ALL_ATTENTION_FUNCTIONS
        self._blocks = _blocks(pretrained)
        # The base model inside a model with a head. A loss may call it directly.
        self._backbone = next(
            module
            for module in reversed(list(pretrained.modules()))
            if isinstance(module, modeling.PreTrainedModel) and self._blocks[0] in module.modules()
        )
        self._signature = inspect.signature(self._backbone.forward)
        self._layout: _Layout | None = None
        self._is_suspended = False
        self.num_unpadded = 0
        """Number of forward passes computed without padding."""

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Keep the padding inside the `with` block, even inside `in_use`."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Skip padding inside the `with` block."""
        before = self._interface[_ATTENTION]

        def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            layout = self._layout
            if layout is None:
                return before(module, query, key, value, mask, **options)
            return _attend(layout, before, module, query, key, value, **options)

        with ExitStack() as stack:
            hooks = [
                self._backbone.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
                self._backbone.register_forward_hook(self._end, always_call=True),
                self._blocks[-1].register_forward_hook(self._unpack),
                *(block.register_forward_pre_hook(self._pack, with_kwargs=True) for block in self._blocks),
            ]
            for hook in hooks:
                stack.callback(hook.remove)
            self._interface.register(_ATTENTION, attention)
            stack.callback(self._interface.register, _ATTENTION, before)
            yield

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = self._signature.bind_partial(*args, **kwargs).arguments.get("attention_mask")
        is_used = torch.is_grad_enabled() and not self._is_suspended
        self._layout = _Layout.of(mask) if is_used and isinstance(mask, Tensor) and mask.dim() == 2 else None
        self.num_unpadded += self._layout is not None

    def _end(self, *_: Any) -> None:
        self._layout = None

    def _pack(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = self._layout
        if layout is None:
            return None
        is_first = block is self._blocks[0]
        inputs = [self._packed(layout, value, is_first=is_first or index > 0) for index, value in enumerate(args)]
        named = {
            name: self._packed(layout, value, is_first=is_first or name != "hidden_states")
            for name, value in kwargs.items()
        }
        return tuple(inputs), named

    def _packed(self, layout: _Layout, value: Any, *, is_first: bool) -> Any:
        """Return an argument of a block in packed form. Hidden states are packed only before the first block."""
        if isinstance(value, tuple | list):
            return type(value)(self._packed(layout, item, is_first=is_first) for item in value)
        if not isinstance(value, Tensor) or not is_first:
            return value
        batch, length = layout.shape
        if value.dim() == 4 and value.shape[-1] == length:
            # This is an attention mask. It is not needed, because attention is computed separately for each text.
            return None
        if value.dim() >= 2 and value.shape[1] == length and value.shape[0] in (1, batch):
            return layout.pack(value)
        if value.dim() <= 1:
            return value
        raise UnpaddingError(f"a tensor of shape {tuple(value.shape)} for a batch of {batch} x {length}")

    def _unpack(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._layout is None:
            return None
        if isinstance(output, tuple):
            return (self._layout.unpack(output[0]), *output[1:])
        return self._layout.unpack(output)


def _attend(
    layout: _Layout, attention: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Any:
    """Compute attention separately for each text. Raise UnpaddingError for options that depend on positions."""
    for name in ("position_bias", "sliding_window", "cache", "s_aux"):
        if options.get(name) is not None:
            raise UnpaddingError(f"attention with {name}")
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == len(layout.cells):
        raise UnpaddingError("attention to keys other than the tokens of the batch")
    is_causal = options.pop("is_causal", None)
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Padding is on the right, so a causal query never sees the padding after its text.
    out, weights = attention(
        module,
        *(layout.to_rectangle(x) for x in (query, key, value)),
        None if is_causal else layout.is_key,
        is_causal=is_causal,
        **options,
    )
    return layout.from_rectangle(out), weights
