"""Any black box as a function on NumPy arrays: PyTorch modules, JAX functions, plain ones."""

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from mhalearn._runtime.arrays import to_numpy
from mhalearn.interop.backend import loaded_torch
from mhalearn.interop.torch_module import causal_mask, refuse_random


def as_function(f: Callable[..., Any], *, causal: bool = False) -> Callable[[NDArray[Any]], Any]:
    """f as a function from a NumPy array (n, k, d) to an array.

    A torch module must be in eval mode. It gets inputs on its own device and in its own dtype,
    computes without gradients, and of a tuple of outputs the first counts. torch's
    nn.MultiheadAttention is called as self-attention, with the layout it wants; causal: and with a
    causal mask. Any other function is called with the array as it is, and may return an array of
    NumPy, JAX or PyTorch, on any device.
    """
    torch = loaded_torch()
    if torch is None or not isinstance(f, torch.nn.Module):
        if causal:
            raise ValueError(
                "causal=True is for torch.nn.MultiheadAttention: mask inside f instead"
            )
        return lambda x: to_numpy(f(x))
    # torch.compile wraps a module in one that keeps the original.
    inner = getattr(f, "_orig_mod", f)
    refuse_random(inner)
    is_attention = isinstance(inner, torch.nn.MultiheadAttention)
    if causal and not is_attention:
        raise ValueError(
            f"causal=True is for torch.nn.MultiheadAttention, not {type(inner).__name__}: "
            "wrap the module in one that masks"
        )
    if not is_attention and any(part.training for part in inner.modules()):
        raise ValueError(f"{type(inner).__name__} is in training mode: call module.eval() first")
    device, dtype = _home(torch, inner)

    def call(x: NDArray[Any]) -> Any:
        with torch.no_grad():
            tokens = torch.as_tensor(x).to(device=device, dtype=dtype)
            if not is_attention:
                return to_numpy(_first(f(tokens)))
            mask = causal_mask(tokens.shape[1], device) if causal else None
            if not inner.batch_first:
                tokens = tokens.transpose(0, 1)
            output = _first(f(tokens, tokens, tokens, need_weights=False, attn_mask=mask))
            return to_numpy(output if inner.batch_first else output.transpose(0, 1))

    return call


def _home(torch: Any, module: Any) -> tuple[Any, Any]:
    """Device and dtype of a module's weights; a module without any takes the defaults."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return torch.get_default_device(), torch.get_default_dtype()


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) else output
