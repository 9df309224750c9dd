"""The version of the package that is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mhalearn")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "unknown"
