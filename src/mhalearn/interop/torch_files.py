"""Files of torch.save, read so that nothing in them is executed."""

import os
from typing import Any

from mhalearn._runtime import storage
from mhalearn.interop.backend import require_torch


def load_torch(path: str | os.PathLike[str], remedy: str) -> Any:
    """What a file of torch.save holds, by weights_only loading, on the CPU.

    remedy: what to do where that cannot be read.
    """
    storage.check_file(path)
    torch = require_torch()
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    # Unpickling damaged or hostile bytes may raise anything.
    except Exception:
        raise ValueError(
            f"{storage.show(path)} is not a readable PyTorch file of tensors (weights_only=True); "
            f"{remedy}"
        ) from None
