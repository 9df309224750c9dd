"""One run at a time: a lock beside a file, which the system releases when its holder dies."""

import errno
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mhalearn._runtime import storage
from mhalearn._runtime.validation import read_count

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(path: storage.AnyPath) -> Iterator[None]:
    """Hold the lock of a file; a ValueError that names the holder where somebody else does.

    The lock is that of a hidden file beside it, which says the holder's process id and host. It is
    the system's (flock): a killed process leaves the hidden file and no lock.
    Trust: where files cannot be locked so, whoever the hidden file names holds it while its process
    lives, and two that begin within the same millisecond may both go on.
    """
    storage.check_writable(path)
    place = storage.beside(path, ".lock")
    descriptor = _acquire(path, place)
    try:
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        with suppress(OSError):
            place.unlink()  # while it is held, so that nobody's next lock is removed
        os.close(descriptor)


def _acquire(path: storage.AnyPath, place: Path) -> int:
    """The descriptor of a lock that is now ours."""
    while True:
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _claim(path, place, descriptor)
            if _is_at(place, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed it while we opened it


def _claim(path: storage.AnyPath, place: Path, descriptor: int) -> None:
    """Lock an open file and write our name into it, or raise."""
    remedy = "let it end, or name another file"
    by_system = False
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            by_system = True
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder, host = _holder(descriptor)
                raise ValueError(_refusal(path, holder, host, remedy)) from None
    if not by_system:
        holder, host = _holder(descriptor)
        if holder is not None and not _is_gone(holder, host):
            remedy += f", or remove {storage.show(place)} if that process is gone"
            raise ValueError(_refusal(path, holder, host, remedy))
    with suppress(OSError):  # a full disk: held all the same, without a name
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, f"{os.getpid()} {platform.node()}".encode())


def _holder(descriptor: int) -> tuple[int | None, str]:
    """The process id and the host that a lock names; None where it names nobody yet."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    pid, _, host = os.read(descriptor, 300).decode(errors="replace").partition(" ")
    return read_count(pid), host


def _is_gone(holder: int, host: str) -> bool:
    """Whether a lock may be taken over. Our own number is that of a dead process before us."""
    return host == platform.node() and (holder == os.getpid() or not storage.is_alive(holder))


def _refusal(path: storage.AnyPath, holder: int | None, host: str, remedy: str) -> str:
    who = "another process" if holder is None else f"process {holder}"
    where = f" on {storage.show(host)}" if host else ""
    return f"{storage.show(path)}: {who}{where} is using this file: {remedy}"


def _is_at(place: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at its place."""
    try:
        return os.path.samestat(os.stat(place), os.fstat(descriptor))
    except FileNotFoundError:
        return False
