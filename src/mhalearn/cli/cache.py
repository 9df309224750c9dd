"""The compilation cache: programs compiled in one run serve the next."""

import contextlib
import hashlib
import os
import platform
import sys
import warnings
from pathlib import Path


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, in the user's cache folder if it can be written.

    MHALEARN_CACHE_DIR names another folder; empty, it turns the cache off.
    """
    import jax

    folder = cache_folder()
    if folder is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        return
    warnings.filterwarnings(
        "ignore", message="Error (reading|writing) persistent compilation cache"
    )
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_folder() -> Path | None:
    chosen = os.environ.get("MHALEARN_CACHE_DIR")
    if chosen is not None:
        return Path(chosen) if chosen else None
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home folder
        return None
    return base / "mhalearn" / _processor()


def _processor() -> str:
    """A name for this kind of processor: compiled programs run on no other."""
    features = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
