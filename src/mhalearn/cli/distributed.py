"""One run over many processes: they meet, the first one speaks, and none waits for a dead one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from typing import Any

from mhalearn.cli.exit_codes import Exit, explain, say

# What a plain launcher sets. Slurm, Open MPI and Kubernetes are known to JAX by theirs.
_PLACE = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_DEAD = "MHALEARN_HEARTBEAT_SECONDS"
_LATE = "MHALEARN_JOIN_SECONDS"
_LOST = (
    "another process of this run died or cannot be reached: look at its last words; "
    "a checkpoint, if one was asked for, is intact: start all again, with --resume"
)
# How collectives and the coordinator say that somebody is gone.
_SIGNS = ("gloo", "nccl", "coordination service", "distributed service", "socket closed")
_GRACE = 1.0
_handlers: list[Any] = []  # C calls them, so they must stay


def join() -> bool:
    """Wait for all processes of the run; whether this one is to speak and write."""
    _keep_stdout_clean()
    _join()
    from mhalearn._runtime.devices import is_first

    _exit_on_abort(_LOST)
    return is_first()


def leave(error: BaseException, command: str) -> None:
    """Leave the run at once after an error, so that the others hear of it and do not wait.

    Returns where there are no others, and where all stop together: after Ctrl-C.
    """
    if not _handlers or isinstance(error, KeyboardInterrupt):
        return
    import jax

    if not jax.distributed.is_initialized():
        return
    if _is_lost(error):
        _leave(say(_LOST, Exit.BROKEN, _who(command)))
    try:
        code = int(explain(error, _who(command)))
    except BaseException:
        traceback.print_exc()
        code = 1
    # The same error in other processes is to be heard before the coordinator is gone.
    time.sleep(_GRACE)
    _leave(code)


def _who(command: str) -> str:
    from mhalearn._runtime.devices import process_index

    return command if process_index() == 0 else f"{command}: process {process_index()}"


def _join() -> None:
    import jax

    given = {name: os.environ.get(name, "") for name in _PLACE}
    missing = [name for name, value in given.items() if not value]
    options: dict[str, Any] = {}
    if len(missing) < len(_PLACE):
        if missing:
            raise ValueError(f"--distributed: {', '.join(missing)} not set beside the others")
        address, count, number = given.values()
        if not (count.isdecimal() and number.isdecimal() and int(number) < int(count)):
            raise ValueError(
                f"--distributed: {_PLACE[2]}={number} and {_PLACE[1]}={count}: number the "
                "processes from 0 to one less than their count"
            )
        if not address.rpartition(":")[2].isdecimal():
            raise ValueError(f"--distributed: {_PLACE[0]}={address}: give host:port")
        options = {"coordinator_address": address, "process_id": int(number)}
        options["num_processes"] = int(count)
    late = _seconds(_LATE, 300)
    where = f" at {given[_PLACE[0]]}" if options else ""
    _exit_on_abort(
        f"--distributed: the processes did not meet{where} within {late} s: check that all were "
        f"started and reach the first one's port; {_LATE} gives them longer"
    )
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=late,
            heartbeat_timeout_seconds=_seconds(_DEAD, 30),
        )
    except ValueError:
        raise ValueError(
            f"--distributed: neither Slurm, Open MPI nor Kubernetes started this process; set "
            f"{', '.join(_PLACE)}"
        ) from None
    except RuntimeError as error:
        raise OSError(f"--distributed: the processes did not meet: {error}") from None


def _keep_stdout_clean() -> None:
    """Collectives greet each other on standard output, from C: let them do so on standard error."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        ours = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), 1)
        sys.stdout = open(ours, "w", encoding=sys.stdout.encoding)  # noqa: SIM115


def _seconds(name: str, otherwise: int) -> int:
    value = os.environ.get(name, str(otherwise))
    if not (value.isdecimal() and int(value) > 0):
        raise ValueError(f"{name}={value}: give a positive number of seconds")
    return int(value)


def _is_lost(error: BaseException) -> bool:
    said = str(error).lower()
    return isinstance(error, ValueError | RuntimeError) and any(sign in said for sign in _SIGNS)


def _exit_on_abort(last_words: str) -> None:
    """JAX aborts when the coordinator or a heartbeat is gone: say so, and end with our own code.

    The handler is C's: one of Python's would wait for a main thread that waits for the dead.
    """
    who = _who("learn")

    def handle(number: int) -> None:
        _leave(say(last_words, Exit.BROKEN, who))

    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(handle))
    with contextlib.suppress(AttributeError, OSError):  # no C library to ask
        ctypes.CDLL(None).signal(int(signal.SIGABRT), _handlers[-1])


def _leave(code: int) -> None:
    """End now: an orderly exit would wait for processes that wait for this one."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
