"""Two small models to train in parallel: a GPT, and an MLP with batch norm.

The GPT has a weight that is used twice, and a parameter that isn't trained; the MLP has buffers,
and looks at the batch as a whole: data parallelism must handle all of these. Both draw their
weights from torch's generator: call `torch.manual_seed` first if ranks or runs must start alike.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[..., Tensor]  # attention(q, k, v, causal=...)


def torch_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Return softmax(q·kᵀ/√D)·v by PyTorch's attention: for each query a mean of the values.

    q, k, v: (..., N, D), and so is the result. With `causal`, query i sees only the keys up to i.
    `ddpkit.flash_attention`, of notebook 09, takes the same arguments.
    """
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, over all targets; 0 where there are none.

    logits: (..., classes). targets: (...), int64; -100 adds 0 to the sum, and counts in the mean.
    Returns one number, in float32 at least.

    So a rank without data still has a loss, and gradients that are zeros: it can take part in the
    step. A mean of nothing would be NaN, on all ranks as soon as they average.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = logits.flatten(0, -2).to(dtype)
    total = F.cross_entropy(rows, targets.flatten(), reduction="sum")
    return total / max(1, targets.numel())


class GPT(nn.Module):
    """A transformer that predicts each next token, much like GPT-2 (Radford et al. 2019).

    vocabulary: number of tokens. context: longest sequence. width: numbers for each token between
    the layers. heads: must divide `width`, ValueError otherwise. layers: number of blocks. dropout:
    of the embeddings and of the output of each half block. attention: as `torch_attention`, always
    called with causal=True, on (n, heads, length, width / heads). kv_heads: heads of keys and
    values, each of which serves heads / kv_heads heads of queries (Ainslie et al. 2023); None:
    `heads`. ValueError: it doesn't divide `heads`.

    head.weight is tokens.weight, one parameter under two names: tokens that are alike when read are
    alike when written (Press and Wolf 2017).

    positions: (context, width), a frozen parameter, a random vector for each position; in GPT-2 it
    is learned. Positions need only be distinguishable, and random vectors are: Vaswani et al. 2017,
    table 3, row E, lose nothing with vectors that aren't learned. Notebook 03.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        context: int = 64,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        dropout: float = 0.0,
        attention: Attention = torch_attention,
        kv_heads: int | None = None,
    ):
        super().__init__()
        if width % heads != 0:
            raise ValueError(
                f"width {width} can't be shared among {heads} heads: make it a multiple of `heads`"
            )
        if heads % (kv_heads or heads) != 0:
            got = f"{heads} heads can't share {kv_heads} of keys and values"
            raise ValueError(f"{got}: make `kv_heads` a divisor of `heads`")
        # Tokens in: a vector for each token, and one for each place.
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width), requires_grad=False)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout, attention, kv_heads) for _ in range(layers)
        )
        # Tokens out: a logit for each token of the vocabulary.
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # one parameter: both uses add to its gradient
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        """Return the next tokens' logits, (n, length, vocabulary). tokens: (n, length), int64.

        places: (length,), int64, the tokens' positions in the sequence; None: 0, 1, 2, ...
        ValueError: a position beyond the context.
        """
        if places is None:
            positions = first(self.positions, tokens.shape[1])
        else:
            needed = 1 + int(places.max())
            positions = first(self.positions, needed)[places]
        x = self.dropout(self.tokens(tokens) + positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def first(positions: Tensor, length: int) -> Tensor:
    """Return the first `length` of GPT's positions, a view. ValueError: there are fewer."""
    if length > len(positions):
        got = f"GPT got sequences of {length} tokens, expected at most {len(positions)}"
        raise ValueError(f"{got}: cut them, or build GPT(context={length})")
    return positions[:length]


class Block(nn.Module):
    """A layer of GPT, on (n, length, width): x + attention(norm(x)), then likewise an MLP."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        attention: Attention,
        kv_heads: int | None = None,
    ):
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads or heads
        self.repeats = heads // self.kv_heads  # each head of k and v serves several of q
        self.attention = attention
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        # No bias: softmax cancels the keys', so its gradient would be rounding errors, and Adam
        # would follow them.
        all_heads = heads + 2 * self.kv_heads
        self.qkv = nn.Linear(width, all_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        hidden = 4 * width
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # Both halves normalize first, and add to x, which so passes through unchanged.
        x = x + self.dropout(self.attend(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def attend(self, x: Tensor) -> Tensor:
        # One product gives all three; heads become an axis before the sequence.
        heads = self.qkv(x).unflatten(-1, (-1, self.head_width))
        heads = heads.transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.repeats > 1:
            k = k.repeat_interleave(self.repeats, dim=1)
            v = v.repeat_interleave(self.repeats, dim=1)
        mixed = self.attention(q, k, v, causal=True)
        # Back to (n, length, width): the heads' outputs side by side.
        side_by_side = mixed.transpose(1, 2).flatten(2)
        return self.out(side_by_side)


class MLP(nn.Sequential):
    """Linear, batch norm and ReLU, `layers` times, and a last Linear: (n, inputs) to (n, outputs).

    While training, batch norm takes mean and variance over the n rows that it is given. So ranks
    that each have a share of the batch don't compute what one process with all of it does. For 1
    row, which has no variance, torch raises ValueError. Notebook 03.
    """

    def __init__(self, inputs: int = 16, width: int = 32, outputs: int = 4, layers: int = 2):
        widths = [inputs] + [width] * layers
        modules = []
        for before, after in pairwise(widths):
            # No bias: batch norm would subtract it.
            modules.append(nn.Linear(before, after, bias=False))
            modules.append(nn.BatchNorm1d(after))
            modules.append(nn.ReLU())
        modules.append(nn.Linear(widths[-1], outputs))
        super().__init__(*modules)
