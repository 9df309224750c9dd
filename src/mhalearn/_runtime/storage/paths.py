"""What a path may name, what an unreadable file may be, and how both are said in one line."""

import os
import stat

AnyPath = str | os.PathLike[str]


def show(path: AnyPath) -> str:
    """A path as an error message may hold it: on one line, in printable characters."""
    text = os.fspath(path)
    return text if text and text.isprintable() else repr(text)


def check_file(path: AnyPath) -> None:
    """Refuse a path that is missing, a folder or a device, before anything opens it."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise ValueError(f"{show(path)} does not exist: check the path") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{show(path)} cannot be read ({reason(error)}): check it") from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"{show(path)} is a folder: give the name of a file")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{show(path)} is not a regular file: give the name of a file")


def looks_like(path: AnyPath) -> str:
    """A guess at what an unreadable file is, from its first bytes."""
    try:
        with open(path, "rb") as file:
            start = file.read(16)
    except OSError as error:
        return reason(error)
    if not start:
        return "it is empty"
    if start.startswith(b"\x93NUMPY"):
        return "it looks like a single NumPy array, an .npy file"
    if start[0] == 0x80 and start[1:2] <= b"\x05":
        return "it looks like a pickle, which could run code and is never loaded"
    if start.startswith(b"PK"):
        return "it looks like a zip archive: damaged, or a pickled PyTorch file, never loaded"
    return "damaged, truncated, or of another format"


def reason(error: Exception) -> str:
    """Why the system refused, without the path it may have put in its message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
