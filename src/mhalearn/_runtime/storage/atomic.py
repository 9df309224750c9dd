"""Writes that are whole or not there, and what a killed one leaves behind."""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from mhalearn._runtime.storage.paths import AnyPath, reason, show

_FROM_OUTSIDE = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


def write_atomically(path: AnyPath, data: bytes) -> None:
    """Put data in a file, all of it or nothing: temporary file, fsync, rename."""
    write_parts(path, [data])


def remove_leftovers(path: AnyPath) -> None:
    """Remove what writes of this file left beside it when their process was killed.

    What another process is writing now stays. So call it before this process writes the file.
    """
    target = _target(path)
    pattern = re.compile(rf"\.{_mark(target)}-([0-9]{{1,18}})-[0-9a-f]{{16}}\.tmp")
    with suppress(OSError):
        for name in os.listdir(target.parent):
            match = pattern.fullmatch(name)
            if match and (int(match[1]) == os.getpid() or not is_alive(int(match[1]))):
                (target.parent / name).unlink(missing_ok=True)


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number here; yes, where the system cannot be asked."""
    if os.name != "posix":
        return True  # there, asking by a signal would end it
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        return True
    return True


def beside(path: AnyPath, ending: str) -> Path:
    """A hidden file beside the one a path names, links followed; always the same one."""
    target = _target(path)
    return target.parent / f".{_mark(target)}{ending}"


def check_writable(path: AnyPath) -> None:
    """Raise now the ValueError that a write would raise later. Leaves nothing behind."""
    with _temporary(path, _target(path)):
        pass


def write_parts(path: AnyPath, parts: Iterable[bytes | memoryview]) -> None:
    """`write_atomically`, of data that come in parts."""
    target = _target(path)
    try:
        with _temporary(path, target) as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(file.name, target)
    except OSError as error:  # in the caller's words, not of a temporary file
        raise OSError(error.errno, reason(error), show(path)) from None
    _sync_folder(target.parent)


def _target(path: AnyPath) -> Path:
    """The file a path names, links followed; a ValueError if no file can be there."""
    try:
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode
    except FileNotFoundError:
        return target
    except NotADirectoryError:
        raise ValueError(f"{show(path)}: {show(target.parent)} is not a folder") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{show(path)}: not a usable path ({reason(error)})") from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"{show(path)} is a folder: give the name of a file")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{show(path)} is not a regular file: give the name of a file")
    return target


@contextmanager
def _temporary(path: AnyPath, target: Path) -> Iterator[BinaryIO]:
    """An empty file beside the target, gone afterwards unless it was renamed."""
    temporary = beside(target, f"-{os.getpid()}-{secrets.token_hex(8)}.tmp")
    try:
        file = open(temporary, "xb")  # noqa: SIM115
    except FileNotFoundError:
        folder = show(target.parent)
        raise ValueError(f"{show(path)}: folder {folder} does not exist; create it first") from None
    except OSError as error:
        if error.errno in _FROM_OUTSIDE:
            raise
        raise ValueError(
            f"{show(path)}: cannot write to folder {show(target.parent)} ({reason(error)}); "
            "choose another place"
        ) from None
    try:
        yield file
    finally:
        with suppress(OSError):  # what a failed write left in the buffer cannot be written either
            file.close()
        temporary.unlink(missing_ok=True)


def _mark(target: Path) -> str:
    """What the temporary files of a target have in common; its own name may be too long."""
    return blake2b(os.fsencode(target.name), digest_size=4).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the system lets a folder be synced."""
    if os.name != "posix":
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
