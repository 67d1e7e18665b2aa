"""Keys and values that later layers read again, stored between the layers as hidden states are."""

import torch

from oneshot.machine import Machine
from oneshot.stream.store import ActivationStore

KeysValues = tuple[torch.Tensor, torch.Tensor]


class LentKeys:
    """Keys and values of one stream, by the type of their attention, for the present batch.

    The stock attention writes and reads it as a dictionary. Keys and values are `(sequences, groups, length, size)`.
    """

    def __init__(self, num_tokens: int, machine: Machine) -> None:
        self._num_tokens, self._machine = num_tokens, machine
        self._stores: dict[str, tuple[ActivationStore, int]] = {}  # with the KV heads
        self._rows, self._sequences = slice(0, 0), 0

    def enter(self, rows: slice, sequences: int) -> None:
        """Go on to another batch, which has these rows of the stream's tokens."""
        self._rows, self._sequences = rows, sequences

    @property
    def names(self) -> list[str]:
        """Return the types of attention that have lent keys and values."""
        return list(self._stores)

    def __setitem__(self, name: str, lent: KeysValues) -> None:
        by_token = torch.cat([one.transpose(1, 2).flatten(2) for one in lent], -1)
        if name not in self._stores:
            store = ActivationStore(self._num_tokens, by_token.shape[-1], self._machine)
            self._stores[name] = store, lent[0].shape[1]
        self._stores[name][0].write(self._rows, by_token)

    def __getitem__(self, name: str) -> KeysValues:
        store, groups = self._stores[name]
        both = store.read(self._rows).unflatten(0, (self._sequences, -1)).unflatten(-1, (2, groups, -1))
        keys, values = both.transpose(1, 3).unbind(2)
        return keys, values

    def close(self) -> None:
        """Release the memory or the files."""
        for store, _ in self._stores.values():
            store.close()
