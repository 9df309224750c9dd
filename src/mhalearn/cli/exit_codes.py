"""How a command ends: exit codes, and one line on standard error for whatever went wrong."""

import contextlib
import enum
import errno
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

_P = ParamSpec("_P")


class Exit(enum.IntEnum):
    """How a command ended, for whoever called it."""

    DONE = 0  # learn and certify: recovered; check: all conditions hold
    BAD_INPUT = 2
    NOT_RECOVERED = 3  # finished, but not recovered, or not all conditions hold
    BROKEN = 4  # from outside: a full disk, a lost shard, no memory
    INTERRUPTED = 130


class Stopped(KeyboardInterrupt):
    """Ctrl-C while learning; `saved` is where the best layer so far is, if anywhere."""

    def __init__(self, saved: str | None) -> None:
        super().__init__()
        self.saved = saved


def guarded(command: Callable[_P, int], group: str = "") -> Callable[_P, int]:
    """Turn what a command raises into one line on standard error and an exit code."""

    @functools.wraps(command)
    def guard(*args: _P.args, **kwargs: _P.kwargs) -> int:
        # import is a keyword: its function is import_; others are named after what they call
        own = command.__name__.removesuffix("_command").rstrip("_")
        name = f"{group} {own}".lstrip()
        try:
            return command(*args, **kwargs)
        except (KeyboardInterrupt, Exception) as error:
            from mhalearn.cli.distributed import leave

            leave(error, name)
            return explain(error, name)

    return guard


def explain(error: BaseException, name: str) -> Exit:
    """One line about what went wrong, and its exit code; what should not happen is raised again."""
    if isinstance(error, KeyboardInterrupt):
        saved = error.saved if isinstance(error, Stopped) else None
        known = f"best layer so far saved to {saved}" if saved else "no layer saved"
        return say("; ".join(["interrupted", known, *_notes(error)]), Exit.INTERRUPTED, name)
    if isinstance(error, ValueError):
        return say(str(error), Exit.BAD_INPUT, name)
    if isinstance(error, OSError):
        return say("; ".join([_why(error), *_notes(error)]), Exit.BROKEN, name)
    # RESOURCE_EXHAUSTED: how XLA says that memory ran out.
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return say("out of memory: use fewer examples or a smaller layer", Exit.BROKEN, name)
    raise error


def say(message: str, code: Exit, command: str = "") -> Exit:
    """One line on standard error; returns the code."""
    line = f"mhalearn {command}".rstrip() + ": " + " ".join(message.split())
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    return code


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _why(error: OSError) -> str:
    if error.strerror is None:
        return str(error)
    place = f"{error.filename}: " if error.filename else ""
    remedy = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{place}{error.strerror}{remedy}"
