"""What linears and embeddings of low rank read and write through."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding


class Coordinates(nn.Module):
    """`rank` numbers that stand for `width` coordinates which a matrix of low rank reads or makes.

    `columns` lists the coordinates: first `rank` of them, then the others, which are linear in the first ones by
    `weight (rank, others)`. So `W x = W' (x[first] + weight x[others])`, with the first columns `W'` of W. Every GPU
    has all of them. vLLM's own linear multiplies, which a CPU does from weights that it has packed.
    """

    weight: nn.Parameter

    def __init__(self, width: int, rank: int, method: Any) -> None:
        super().__init__()
        self.sizes = rank, width - rank
        self.columns: torch.Tensor
        self.register_buffer("columns", torch.arange(width))
        self.quant_method = method  # by this name vLLM finds what it packs
        dtype, inputs = torch.get_default_dtype(), width - rank
        method.create_weights(self, inputs, [rank], inputs, rank, dtype, weight_loader=_load_transposed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """States `(tokens, width)` -> `(tokens, rank)`, which stand for them."""
        if x.dtype == torch.float32:
            chosen = x.index_select(-1, self.columns)  # a CPU gathers slower, but faster in other dtypes
        else:
            chosen = x.gather(-1, self.columns.expand(x.shape))
        first, others = chosen.split(self.sizes, dim=-1)
        return first + self.quant_method.apply(self, others)


def _load_transposed(weight: torch.Tensor, loaded: torch.Tensor) -> None:
    weight.data.copy_(loaded.T)


def coordinates_of(width: int, rank: int) -> nn.Module:
    """Return what a linear of this rank reads through; nothing for rank 0, a whole linear."""
    return Coordinates(width, rank, UnquantizedLinearMethod()) if rank else nn.Identity()


class TableMap(Coordinates):
    """Let a table read through coordinates as an output head, and make the whole width from its rows."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(width, rank, UnquantizedEmbeddingMethod())  # which keeps the weight beside a packed one

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows `(tokens, rank)` -> `(tokens, width)`."""
        every = torch.cat((rows, rows @ self.weight), dim=-1)
        return torch.empty_like(every).scatter(-1, self.columns.expand(every.shape), every)


class Embedding(nn.Module):
    """Ranges of the vocabulary, each a table of its own rank, with a map to the full width where that is more.

    `places` says where in all tables each token is.
    """

    def __init__(self, ranges: list[dict[str, int]], width: int) -> None:
        super().__init__()
        self.rows = [part["rows"] for part in ranges]
        ranks = [part["rank"] for part in ranges]
        self.tables: Any = nn.ModuleList(
            [VocabParallelEmbedding(rows, rank) for rows, rank in zip(self.rows, ranks, strict=True)]
        )
        self.maps: Any = nn.ModuleList([TableMap(width, rank) if rank < width else nn.Identity() for rank in ranks])
        self.places: torch.Tensor
        self.register_buffer("places", torch.arange(sum(self.rows)))
        self.logits_of_range: Any = nn.ModuleList([LogitsProcessor(rows) for rows in self.rows])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `(n,)` -> their embeddings `(n, width)`."""
        start, places = 0, self.places[tokens]
        embedded: Any = None
        for rows, table, to_width in zip(self.rows, self.tables, self.maps, strict=True):
            number = places - start
            found = table(number.clamp(0, rows - 1))
            if isinstance(to_width, TableMap):
                found = to_width.expand(found)
            # a later range takes its tokens from the earlier ones
            embedded = found if embedded is None else torch.where((number >= 0).unsqueeze(-1), found, embedded)
            start += rows
        return embedded

    def logits(self, states: torch.Tensor) -> torch.Tensor | None:
        """Last states `(n, width)` -> the tied head's logits; None on a GPU that does not sample."""
        parts = [
            logits(table, read(states))
            for logits, table, read in zip(self.logits_of_range, self.tables, self.maps, strict=True)
        ]
        return None if any(part is None for part in parts) else torch.cat(parts, dim=-1).index_select(-1, self.places)
