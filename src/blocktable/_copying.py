"""Objects that own live state: pickling and copying are refused, with what to do instead."""

from typing import ClassVar, NoReturn, SupportsIndex

from blocktable.errors import NotCopyable


class Uncopied:
    """An object of which there is one: a copy would hand out the same blocks again, or share its arrays by accident."""

    copy_instead: ClassVar[str]

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        """Refuse pickle, copy and deepcopy alike: all three ask here."""
        name = type(self).__name__
        raise NotCopyable(f"a {name} is neither copied nor pickled", values={"type": name}, remedy=self.copy_instead)
