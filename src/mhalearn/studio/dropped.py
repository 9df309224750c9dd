"""Files that were dropped on the page: written to a folder of the studio's, checked, forgotten."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhalearn.studio.own_data import check_names
from mhalearn.studio.request import Limits, Sizes

# Seconds for a file to come from this machine, and to be read.
_ARRIVAL_SECONDS, _READING_SECONDS = 60.0, 60.0
_READER = (sys.executable, "-m", "mhalearn.studio.own_data")


@dataclass(frozen=True)
class Dropped:
    """Files of one drop: names as the visitor has them, and where they are."""

    number: int
    files: Mapping[str, Path]
    sizes: Sizes

    def summary(self) -> dict[str, Any]:
        sizes = dataclasses.asdict(self.sizes)
        lengths = sizes.pop("lengths")
        named = {"number": self.number, "name": ", ".join(self.files)}
        return named | sizes | {"shortest": min(lengths, default=sizes["k"])}


class DroppedFiles:
    """All that was dropped on the page of a server; the newest are kept, and none outlives it."""

    def __init__(
        self, limits: Limits, environment: dict[str, str], folder: Callable[[], Path]
    ) -> None:
        self._limits, self._environment, self._folder = limits, environment, folder
        self._kept: dict[int, Dropped] = {}
        self._count = 0
        self._turn = asyncio.Lock()  # one file at a time: each may be large

    def find(self, number: int) -> Dropped | None:
        return self._kept.get(number)

    def find_sizes(self, number: int) -> Sizes | None:
        found = self.find(number)
        return None if found is None else found.sizes

    async def receive(
        self, names: Sequence[str], sizes: Sequence[int], parts: AsyncIterator[bytes]
    ) -> Dropped:
        """Files that come one after another in one stream. ValueError: one line."""
        check_names(names)
        if sum(sizes) > self._limits.file_bytes:
            raise ValueError(
                f"{sum(sizes) / 1e6:.0f} MB are too much for this page, which takes at most "
                f"{self._limits.file_bytes / 1e6:.0f}: use mhalearn learn"
            )
        async with self._turn:
            self._count += 1
            folder = self._folder() / f"data-{self._count}"
            folder.mkdir()
            try:
                files = await self._write(folder, names, sizes, parts)
                dropped = Dropped(self._count, files, await self._read(files))
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._kept[dropped.number] = dropped
            self._forget_old()
        return dropped

    async def _write(
        self, folder: Path, names: Sequence[str], sizes: Sequence[int], parts: AsyncIterator[bytes]
    ) -> dict[str, Path]:
        # The visitor's names are for display alone.
        paths = [folder / f"{i}{Path(name).suffix.lower()}" for i, name in enumerate(names)]
        body = bytearray()
        try:
            async with asyncio.timeout(_ARRIVAL_SECONDS):
                async for part in parts:
                    body += part
                    if len(body) > sum(sizes):
                        break
        except TimeoutError:
            raise ValueError(f"the file did not come within {_ARRIVAL_SECONDS:g} seconds") from None
        if len(body) != sum(sizes):
            raise ValueError("the file came with another size than it was announced: try again")
        begin = 0
        for path, size in zip(paths, sizes, strict=True):
            await asyncio.to_thread(path.write_bytes, body[begin : begin + size])
            begin += size
        return dict(zip(names, paths, strict=True))

    async def _read(self, files: Mapping[str, Path]) -> Sizes:
        """Its sizes, found by a process of its own: no file takes the server down."""
        process = await asyncio.create_subprocess_exec(
            *_READER,
            json.dumps(dataclasses.asdict(self._limits)),
            json.dumps({name: str(path) for name, path in files.items()}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), _READING_SECONDS)
            found = json.loads(said)
        except (TimeoutError, ValueError):
            raise ValueError(f"{', '.join(files)[:60]} could not be read: save it again") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if "error" in found:
            raise ValueError(found["error"])
        return Sizes(**found | {"lengths": tuple(found["lengths"])})

    def _forget_old(self) -> None:
        for number in list(self._kept)[: max(0, len(self._kept) - self._limits.files)]:
            folder = next(iter(self._kept.pop(number).files.values())).parent
            shutil.rmtree(folder, ignore_errors=True)
