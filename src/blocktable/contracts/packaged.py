"""Read a data file of this package entry by entry: a question needs a few backends, and parsing them all takes longest.

The file stays the one source, and is written so that each ``[[backend]]`` starts with its name. An entry that is wrong is
refused when it is first read, by reading the whole file as any other is.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from blocktable.contracts.catalogue import Catalogue, Record, read_catalogue, read_entries
from blocktable.errors import CatalogueError

__all__ = ["read_packaged"]

_ENTRY = re.compile(r'^\[\[backend\]\]\nname = "([^"]+)"\n(?:(?!\[\[|\[(?!backend\.)).*\n?)*', re.MULTILINE)


def read_packaged(text: str, file: str) -> Catalogue:
    """Return what `read_catalogue` does, the entries read on first use. Cost: linear in what is no backend."""
    entries: dict[str, str] = {}
    for entry in _ENTRY.finditer(text):
        entries[entry[1]] = entries.get(entry[1], "") + entry[0]
    data = read_catalogue(_ENTRY.sub("", text), file, names=entries)
    return replace(data, records=_Entries(entries, data, text, file))


class _Entries(Mapping[str, tuple[Record, ...]]):
    """Records by name, each parsed on first use."""

    def __init__(self, entries: dict[str, str], data: Catalogue, text: str, file: str) -> None:
        self._entries, self._data, self._text, self._file = entries, data, text, file
        self._read: dict[str, tuple[Record, ...]] = {}

    def __getitem__(self, name: str) -> tuple[Record, ...]:
        if name not in self._read:
            text = f'engine = "{self._data.engine}"\n{self._entries[name]}'
            try:
                self._read[name] = read_entries(text, self._file, self._data.refusals)
            except CatalogueError:
                read_catalogue(self._text, self._file)  # with the line in the whole file
                raise
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
