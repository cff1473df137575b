"""One field of a page: where the bytes of each token lie, and access to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import formats


@dataclass(frozen=True)
class Field:
    """`count` numbers of one format for each token.

    Byte b of token t lies at page_tokens * base + offset + t * stride + b, unless `tile` = (T, W) shuffles the block
    into tiles of T tokens by W bytes (aiter's preshuffle): tile after tile for T tokens, token after token in a tile.
    """

    name: str
    format: str
    count: int
    base: int = 0  # bytes per token of the blocks that lie before this one in the page
    offset: int = 0  # bytes from the start of the token's row
    stride: int = 0  # bytes from one token's row to the next
    tile: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of this field per token."""
        return self.count * formats.FORMATS[self.format].bits // 8

    def start(self, page_tokens: int) -> int:
        """First byte of the field's block inside a page."""
        return page_tokens * self.base + self.offset

    def view(self, pool: Tensor, page_tokens: int) -> Tensor:
        """Writable uint8 view [pages, P/T, T, tiles, W] of the field's bytes (T = tiles = 1 without `tile`)."""
        if self.tile is None:
            shape = (pool.shape[0], page_tokens, 1, 1, self.bytes)
            stride: tuple[int, ...] = (pool.stride(0), self.stride, 0, 0, 1)
        else:
            rows, width = self.tile
            shape = (pool.shape[0], page_tokens // rows, rows, self.bytes // width, width)
            stride = (pool.stride(0), self.stride * rows, width, rows * width, 1)
        return pool.as_strided(shape, stride, pool.storage_offset() + self.start(page_tokens))

    def place(self, offset: Tensor) -> tuple[Tensor, Tensor | int]:
        """Where `view` has the token at an offset in its page: (row, place in its tile)."""
        if self.tile is None:
            return offset, 0
        return offset // self.tile[0], offset % self.tile[0]

    def take(self, pool: Tensor, page_tokens: int, *index: Tensor | int) -> Tensor:
        """A copy of the bytes at `index` (page, or page, row and place in its tile) of `view`."""
        view = self.view(pool, page_tokens)
        if view.is_cuda:
            return view[index]
        # numpy copies the bytes of a row in one piece, torch one by one: 20 times as long
        return torch.from_numpy(view.numpy()[_plain(index)])

    def put(self, pool: Tensor, page_tokens: int, data: Tensor, *index: Tensor | int) -> None:
        """Write bytes uint8 [n, bytes] at `index` (page, row and place in its tile) of `view`."""
        view = self.view(pool, page_tokens)
        data = data.reshape(-1, *view.shape[3:])
        if view.is_cuda:
            view[index] = data
        else:  # as in `take`
            view.numpy()[_plain(index)] = data.numpy()

    def stored(self, pool: Tensor, page_tokens: int) -> Tensor:
        """The field as stored: uint8 [pages, page_tokens, bytes], or float32 / bfloat16 [pages, page_tokens, count].

        The uint8 form is a view where strides allow.
        """
        data = self.view(pool, page_tokens).flatten(3).flatten(1, 2)
        kind = formats.FORMATS[self.format].stored
        return data if kind == torch.uint8 else data.contiguous().view(kind)

    def address(self, page_tokens: int) -> Tensor:
        """int64 [page_tokens, bytes]: where each byte of each token's field lies inside the page."""
        rows, width = self.tile or (1, self.bytes)
        token = torch.arange(page_tokens)[:, None]
        byte = torch.arange(self.bytes)[None, :]
        if self.tile is None:
            return self.start(page_tokens) + token * self.stride + byte
        inside = (byte // width) * (rows * width) + (token % rows) * width + byte % width
        return self.start(page_tokens) + token // rows * (self.stride * rows) + inside


def _plain(index: tuple[Tensor | int, ...]) -> tuple[Any, ...]:
    return tuple(one if isinstance(one, int) else one.numpy() for one in index)
