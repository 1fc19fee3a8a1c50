"""Names of GPUs and the compute capabilities that rules are written in."""

from blocktable.errors import UnknownName

__all__ = ["capability", "runs_on"]

_NAMES = {
    "v100": "7.0",
    "t4": "7.5",
    "a100": "8.0",
    "a10": "8.6",
    "a10g": "8.6",
    "a40": "8.6",
    "a6000": "8.6",
    "rtx-3090": "8.6",
    "l4": "8.9",
    "l40": "8.9",
    "l40s": "8.9",
    "rtx-4090": "8.9",
    "h100": "9.0",
    "h200": "9.0",
    "h20": "9.0",
    "gh200": "9.0",
    "b200": "10.0",
    "gb200": "10.0",
    "b300": "10.3",
    "gb300": "10.3",
    "rtx-pro-6000": "12.0",
    "rtx-5090": "12.0",
    "gb10": "12.1",
    "dgx-spark": "12.1",
    "mi300x": "rocm",
    "mi325x": "rocm",
    "mi355x": "rocm",
    "rocm": "rocm",
    "xpu": "xpu",
    "tpu": "tpu",
    "tpu-v5e": "tpu",
    "tpu-v5p": "tpu",
    "tpu-v6e": "tpu",
    "cpu": "cpu",
}


def capability(name: str) -> str:
    """Return the compute capability, or the platform, of a GPU by name; a capability such as ``"9.0"`` is taken as it is.

    What tells the variants of one GPU apart may follow its name.

    >>> capability("H200"), capability("rtx_pro_6000"), capability("10.3"), capability("cpu"), capability("NVIDIA H100 80GB HBM3")
    ('9.0', '12.0', '10.3', 'cpu', '9.0')
    """
    folded = name.strip().casefold().replace("_", "-").replace(" ", "-")
    for maker in ("nvidia-", "amd-", "instinct-", "geforce-", "tesla-", "sm"):
        folded = folded.removeprefix(maker)
    for known in (folded, f"rtx-{folded}"):
        if found := max((one for one in _NAMES if f"{known}-".startswith(f"{one}-")), key=len, default=""):
            return _NAMES[found]
    major, dot, minor = folded.partition(".")
    if dot and major.isdecimal() and minor.isdecimal():
        return folded
    if not dot and folded.isdecimal() and len(folded) in (2, 3):
        return f"{folded[:-1]}.{folded[-1]}"
    raise UnknownName(
        f"no GPU {name!r}",
        values={"what": "GPU", "name": name, "known": tuple(_NAMES)},
        remedy=f"one of {', '.join(_NAMES)}, or a compute capability such as 9.0",
    )


def runs_on(pattern: str, hardware: str) -> bool:
    """Whether hardware fits a pattern such as ``"10.0"``, ``"10.x"`` or ``"cpu"``.

    >>> runs_on("10.x", "10.3"), runs_on("9.0", "9.1"), runs_on("cpu", "cpu")
    (True, False, True)
    """
    return pattern == hardware or (pattern.endswith(".x") and hardware.partition(".")[0] == pattern[:-2])
