"""plan: how many examples a wanted parameter error takes, before anything is paid for."""

from __future__ import annotations

from typing import Annotated

import typer

from mhalearn.cli.exit_codes import Exit, guarded
from mhalearn.cli.options import Json, Seed
from mhalearn.cli.output import print_facts, print_json, times

commands = typer.Typer()
# Examples over the counting limit from which on a fit finds most layers; what is said below that.
_ENOUGH = 3.0
_FINDING = (
    "takes a fit some 1.25 to 3 times the counting limit, the more the coarser labels are; "
    "mhalearn extract begins with 3, and with 8 where they are coarse"
)


@commands.command(
    "plan",
    epilog="Examples:\n\n"
    "  mhalearn plan --dim 8 --heads 6 --error 1e-6 --labels float32\n\n"
    "  mhalearn plan --dim 8 --heads 2 --error 0.01 --labels 0.05\n\n"
    "Labels: float64, float32, float16, bfloat16, a number of mantissa bits, or the deviation of "
    "noise relative to the labels.",
)
@guarded
def plan_command(
    dim: Annotated[int, typer.Option(min=1, metavar="D", help="Features of a token.")],
    heads: Annotated[int, typer.Option(min=1, metavar="N", help="Heads of the layer.")],
    error: Annotated[float, typer.Option(help="Relative parameter error that is wanted.")],
    labels: Annotated[str, typer.Option(help="Precision of the labels.")] = "float64",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an example.")] = 8,
    outputs: Annotated[int | None, typer.Option(min=1, help="Outputs, if not D.")] = None,
    head_dim: Annotated[
        int | None, typer.Option(min=1, metavar="H", help="Rank of Theta and W.")
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="With key vectors and output bias.")] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Tokens see only earlier ones.")] = False,
    inputs: Annotated[str, typer.Option(help="boolean or gaussian tokens.")] = "gaussian",
    scale: Annotated[float, typer.Option(help="Norm of each Theta, about.")] = 2.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Say how many examples or calls a wanted parameter error takes."""
    import mhalearn as mha

    architecture = mha.Architecture(
        dim, heads, head_dim=head_dim, out_dim=outputs, bias=bias, causal=causal
    )
    found = mha.plan(
        architecture,
        error,
        labels=_read_labels(labels),
        tokens=tokens,
        inputs=inputs,
        scale=scale,
        seed=seed,
    )
    if as_json:
        print_json(found.to_dict())
        return Exit.DONE
    finding = {} if found.ratio >= _ENOUGH else {"but finding it": _FINDING}
    print_facts(
        {
            "examples": f"{found.examples}: {times(found.examples, found.counting_limit)}",
            "scalars": str(found.scalars),
            "calls": f"{found.examples} that answer at all rows, or {found.calls_of_last_row} that "
            "answer at the last",
            "predicted error": f"{found.predicted_error:.1e} with {found.labels} labels",
            **finding,
            "other labels": ", ".join(
                f"{name}: {count}" for name, count in found.alternatives.items()
            ),
        }
    )
    return Exit.DONE


def _read_labels(text: str) -> str | int | float:
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text
