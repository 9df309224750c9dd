"""Checksums that files carry, so that bytes which have changed are told, and not taken for data.

A safetensors file has none of its own. Those written here hold, in their metadata, a digest of each
tensor's bytes, so that one can be checked without the others, and a digest of all the rest: names,
dtypes, shapes, metadata, and the digests of the tensors.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Where they lie in the metadata of a file.
CHECKSUMS = "mhalearn_checksums"

Layout = Mapping[
    str, tuple[str, Iterable[int]]
]  # of tensors: dtype, as the file says it, and shape


def make_checksums(metadata: Mapping[str, str], layout: Layout, digests: Mapping[str, str]) -> str:
    """What a file says under CHECKSUMS. digests: of the tensors, by name."""
    rest = digest_json([metadata, {name: [code, *shape] for name, (code, shape) in layout.items()}])
    return _canonical({"tensors": dict(digests), "rest": digest_json([rest, digests])})


def split_checksums(
    metadata: Mapping[str, str], layout: Layout
) -> tuple[dict[str, str], dict[str, str]]:
    """Metadata without checksums, and the digests of tensors; none where a file carries none.

    A ValueError where what the file says of itself is not what was written.
    """
    others = dict(metadata)
    said = others.pop(CHECKSUMS, None)
    if said is None:
        return others, {}
    try:
        digests = {str(name): str(digest) for name, digest in json.loads(said)["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("its checksums are not readable") from None
    if digests.keys() != layout.keys() or said != make_checksums(others, layout, digests):
        raise ValueError("what it says of itself does not match its checksum")
    return others, digests


def digest_array(parts: Iterable[NDArray[Any]]) -> str:
    """Of the bytes of an array whose rows come part by part. Cost: some two seconds a gigabyte."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def digest_json(value: Any) -> str:
    """Of what JSON can hold."""
    return blake2b(_canonical(value).encode(), digest_size=8).hexdigest()


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
