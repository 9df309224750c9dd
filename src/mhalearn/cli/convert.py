"""import and export: layers out of other libraries' files and into them."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mhalearn.cli.exit_codes import Exit, guarded
from mhalearn.cli.options import Json, LayerFile
from mhalearn.cli.output import print_facts, print_json, say_heads

if TYPE_CHECKING:
    from mhalearn.layer.base import Layer

commands = typer.Typer()


class Library(enum.StrEnum):
    TORCH = "torch"
    HUGGINGFACE = "huggingface"


class Target(enum.StrEnum):
    TORCH = "torch"
    TRANSFORMER_LENS = "transformerlens"


class Dtype(enum.StrEnum):
    FLOAT32 = "float32"
    FLOAT64 = "float64"


Out = Annotated[Path, typer.Option(metavar="FILE", help="File to write.")]


@commands.command(
    "import",
    epilog="Examples:\n\n"
    "  mhalearn import huggingface model.safetensors --layer 3 --out layer.safetensors\n\n"
    "  mhalearn import torch attention.pt --heads 8 --out layer.safetensors\n\n"
    "huggingface reads BERT, GPT-2 and TransformerLens names and, by the config.json beside them, "
    "Llama and other decoders; FILE may be a folder or index of shards. PyTorch's own files need "
    "torch, .safetensors files do not.",
)
@guarded
def import_(
    library: Annotated[Library, typer.Argument(metavar="torch|huggingface", help="Whose names.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A state dict.")],
    out: Out,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Heads, where the file does not tell.")
    ] = None,
    layer: Annotated[int, typer.Option(min=0, help="Number of the layer in the model.")] = 0,
    causal: Annotated[
        bool | None,
        typer.Option("--causal/--not-causal", help="Masked or not, if the names do not tell."),
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="What the names begin with, among several models.")
    ] = None,
    no_rope: Annotated[
        bool, typer.Option("--no-rope", help="A Llama-style layer without rotary positions.")
    ] = False,
    cross: Annotated[
        bool, typer.Option("--cross", help="A decoder's layer that looks at the encoder.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Read one attention layer of a model as a layer file."""
    from mhalearn import interop

    _check_places(file, out, (".safetensors",))
    if library is Library.TORCH:
        if no_rope:
            raise ValueError("--no-rope is for huggingface: torch's module has no such positions")
        if cross:
            raise ValueError("--cross is for huggingface: torch's module does not say what it sees")
        read = interop.from_torch_state(
            file, heads, layer_index=layer, causal=causal, prefix=prefix
        )
    else:
        rope = False if no_rope else None
        read = interop.from_huggingface(
            file, layer, heads, causal=causal, prefix=prefix, rope=rope, cross=cross
        )
    read.save(out)
    _tell(read, out, as_json)
    return Exit.DONE


@commands.command(
    epilog="Examples:\n\n"
    "  mhalearn export torch layer.safetensors --out attention.safetensors\n\n"
    "  mhalearn export torch layer.safetensors --head-dim 32 --dtype float32 --out attention.pt\n\n"
    "Weights that came from a model go back unchanged; others are singular vectors."
)
@guarded
def export(
    target: Annotated[Target, typer.Argument(metavar="torch|transformerlens", help="Whose names.")],
    layer: LayerFile,
    out: Out,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of the module; zeros fill what is missing.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Head dimension.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Precision; as the weights are unless given.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Singular values this small, relatively, count as zero.")
    ] = 1e-8,
    as_json: Json = False,
) -> int:
    """Write a layer as the state dict of a torch.nn.MultiheadAttention or of TransformerLens."""
    import mhalearn as mha
    from mhalearn import interop

    _check_places(layer, out, (".safetensors", ".pt"))
    known = mha.load_layer(layer)
    facts = {"causal": str(known.causal).lower()}
    if target is Target.TRANSFORMER_LENS:
        if heads is not None:
            raise ValueError(f"--heads {heads}: TransformerLens takes the heads as they are")
        state = interop.to_transformer_lens(known, head_dim=head_dim, tolerance=tolerance)
    else:
        heads = _count_heads(known, heads, head_dim)
        state = interop.to_torch_state(known, n_heads=heads, tolerance=tolerance)
        facts["n_heads"] = str(heads)
    if dtype is not None:
        state = {name: array.astype(dtype.value) for name, array in state.items()}
    interop.write_state_dict(out, state, facts)
    _tell(known, out, as_json)
    return Exit.DONE


def _count_heads(layer: Layer, heads: int | None, head_dim: int | None) -> int:
    if head_dim is None:
        return layer.n_heads if heads is None else heads
    if layer.d % head_dim:
        raise ValueError(f"--head-dim {head_dim} does not divide d = {layer.d}")
    if heads not in (None, layer.d // head_dim):
        raise ValueError(
            f"--heads {heads} and --head-dim {head_dim} conflict: torch needs heads x head "
            f"dimension = d = {layer.d}; leave one out"
        )
    return layer.d // head_dim


def _check_places(source: Path, out: Path, suffixes: tuple[str, ...]) -> None:
    from mhalearn._runtime import storage

    if out.suffix not in suffixes:
        raise ValueError(f"--out {storage.show(out)}: name a file that ends in {_or(suffixes)}")
    storage.check_writable(out)
    if os.path.realpath(source) == os.path.realpath(out):
        raise ValueError(f"--out {storage.show(out)} is the file to read: choose another name")


def _or(words: tuple[str, ...]) -> str:
    return " or ".join(words)


def _tell(layer: Layer, out: Path, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "heads": layer.n_heads,
                "dim": layer.d,
                "out_dim": layer.out_dim,
                "bias": layer.architecture.bias,
                "causal": layer.causal,
                "file": out,
            }
        )
    else:
        kind = "causal" * layer.causal or "not causal"
        print_facts({"layer": f"{say_heads(layer.n_heads)}, d = {layer.d}, {kind}: {out}"})
