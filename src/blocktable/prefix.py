"""The identity of a prefix beyond its tokens: whose it is, under which adapter, with which other content."""

from blocktable.errors import ArgumentError

__all__ = ["salt"]


def salt(
    *,
    tenant: str | bytes | int | None = None,
    adapter: str | bytes | int | None = None,
    content: str | bytes | int | None = None,
) -> bytes:
    """Return the salt under which a prompt's prefix is cached: equal bytes only for equal arguments.

    Each argument given (text, bytes or an integer) is written with a tag of its name and type and with its length, so
    that no two different sets of arguments give the same bytes. None: not part of the identity; all None: ``b""``, the
    same as no salt. ``content`` is for what the tokens do not say, such as the hash of an image.

    >>> salt(adapter="x") == salt(tenant="x")
    False
    >>> salt(tenant="ab", adapter="c") == salt(tenant="a", adapter="bc")
    False
    >>> salt()
    b''
    """
    return b"".join(
        _field(tag, value) for tag, value in ((b"t", tenant), (b"a", adapter), (b"c", content)) if value is not None
    )


def _field(tag: bytes, value: object) -> bytes:
    if isinstance(value, str):
        kind, data = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, (bytes, bytearray, memoryview)):
        kind, data = b"b", bytes(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        kind, data = b"i", str(value).encode()
    else:
        raise ArgumentError(
            f"a salt is made of text, bytes or integers, got {type(value).__name__}",
            law="L10",
            values={"got": type(value).__name__},
            remedy="pass a str, bytes or int, or leave it out",
        )
    return tag + kind + len(data).to_bytes(8, "little") + data
