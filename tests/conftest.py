"""What all tests share: checked shapes, and compiled programs."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from jaxtyping import install_import_hook

# Shapes and types are checked in the tests, not for users; the hook must come before the package.
hook = install_import_hook("mhalearn", "beartype.beartype")

# Most of the tests' time is compilation. XLA's older emitters compile a fit in half the time.
_EMITTERS = "xla_cpu_use_fusion_emitters"
_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Workers and the processes that tests start inherit what is set here; JAX reads it once."""
    assert "jax" not in sys.modules
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # new in each session
        config.stash[_CACHE] = tempfile.mkdtemp(prefix="mhalearn-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = config.stash[_CACHE]
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Two processes that compile the same program write the same file, and one may read half of it.
    ignored = [
        f"ignore:Error {doing} persistent compilation cache" for doing in ("reading", "writing")
    ]
    for line in ignored:
        config.addinivalue_line("filterwarnings", line)
    os.environ["PYTHONWARNINGS"] = ",".join(ignored)
    if _EMITTERS not in os.environ.get("XLA_FLAGS", "") and _xla_knows(_EMITTERS):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_EMITTERS}=false"


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def _xla_knows(flag: str) -> bool:
    """Whether this jaxlib has the flag: XLA ends a process that is given another."""
    asked = os.environ | {"XLA_FLAGS": f"--{flag}=false", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=asked, capture_output=True, check=False).returncode == 0
