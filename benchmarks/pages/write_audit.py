"""Write docs/audit.md: the tutorial, what benchmarks/audit.py measured, and the catalogue.

python benchmarks/pages/write_audit.py
"""

import json
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is a package there

from benchmarks import DOCS, RESULTS
from benchmarks.audit import SEQUENCES
from benchmarks.audited.calibration import Said, fitted_shares, halves
from benchmarks.audited.layers import DRAWN, NAMES, TOKENS
from benchmarks.audited.planted import PLANTED
from benchmarks.pages.picture import picture
from mhalearn.auditing.catalogue import FAULTS
from mhalearn.auditing.confidence import confidence

OUT = DOCS / "audit.md"
Record = dict[str, Any]

TUTORIAL = """# Which attention does this box really compute?

Written by `benchmarks/pages/write_audit.py` from the code's own catalogue and from
`benchmarks/results/audit.json`; no figure here is typed by hand.

Whoever ports, compiles, quantises or serves a model meets silent faults: a window lost, a sink
dropped, the rotary layout swapped, heads of a group in the wrong order. `mha.audit(claimed, box)`
says what differs: the name of the fault, the head, the number behind it.

## A Llama block, ported with two mistakes

The block of transformers is the truth, and what is claimed are its weights with its config. The
port below is a dozen lines, as one writes them, and wrong in two of them.

```python
import mhalearn as mha
import torch
import transformers

torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=64, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=1,
    intermediate_size=64, vocab_size=32, initializer_range=0.2, rope_theta=500000.0,
)  # fmt: skip
model = transformers.LlamaModel(config).eval()
claimed = mha.from_huggingface(model.state_dict(), config=config.to_dict())
block = model.layers[0].self_attn


@torch.no_grad()
def original(x):
    x = torch.as_tensor(x, dtype=torch.float32)
    places = model.rotary_emb(x, torch.arange(x.shape[1])[None])
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
    return block(x, position_embeddings=places, attention_mask=mask)[0]


assert mha.audit(claimed, original, n=32, k=24).ok
```

```python
@torch.no_grad()
def ported(x):
    x = torch.as_tensor(x, dtype=torch.float32)
    n, k, _ = x.shape
    q = block.q_proj(x).view(n, k, 8, 8).transpose(1, 2)
    key = block.k_proj(x).view(n, k, 2, 8).transpose(1, 2)
    v = block.v_proj(x).view(n, k, 2, 8).transpose(1, 2)
    angles = torch.arange(k)[:, None] * 500000.0 ** (-torch.arange(0, 8, 2) / 8)

    def rotate(z):  # the first mistake: pairs are (0, 1), (2, 3), ...
        a, b = z[..., 0::2], z[..., 1::2]
        turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
        return torch.stack(turned, dim=-1).flatten(-2)

    key, v = key.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)  # the second: 0, 1, 0, 1, ...
    logits = rotate(q) @ rotate(key).mT / 8**0.5
    logits = logits.masked_fill(torch.ones(k, k).triu(1).bool(), -torch.inf)
    return block.o_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


found = mha.audit(claimed, ported, n=32, k=24)
print(found)

assert not found.ok
assert {one.name for one in found.findings} == {"rotary-layout", "groups-interleaved"}
```

It prints both, each with the error without it and with it. `found.findings` has the same as
records (`name`, `head`, `heads`, `sentence`, `numbers`, `confidence`, `seen_in`);
`found.write_report(path)` writes a page with expected and found patterns of the first rows that
differ, and a notebook shows a card.

## What it takes

`claimed` is a layer, the file of one, or weights of a [Hugging Face model](interop.md) with their
config. The box is a function, a torch module or a JAX function, which is asked; or examples that
were [recorded](activations.md) elsewhere, padded or not, with position ids or without. Heads may
read keys from a latent, or from a second sequence: a box of cross-attention is a function of the
tokens and the memory, and recorded ones are `Examples(X, Y, memory=...)`.

```bash
mhalearn generate --heads 2 --dim 8 --tokens 6 --examples 50 --out claim
mhalearn audit claim/layer.safetensors claim/examples.safetensors --report audit.html
mhalearn audit claim/layer.safetensors claim/examples.safetensors --json
```

Exit code 0: it computes what was claimed; 3: it differs. `mhalearn audit LAYER MODULE:FUNCTION`
asks a function of a Python file in the working folder; `--config` and `--layer` say which layer of
a model's weights is meant.

## In the tests of a port

`assert_same_attention` fails with the findings as its message:

```python
from mhalearn.testing import assert_same_attention

try:
    assert_same_attention(claimed, ported, n=32, k=24)
except AssertionError as error:
    message = str(error)

assert "the rotary layout is interleaved where half-split was claimed" in message
```

In continuous integration, with weights that fit into the repository (one layer at random weights
finds the same faults as the model's own):

```yaml
# .github/workflows/attention.yml
on: [push]
jobs:
  attention:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - run: pip install mhalearn
      - run: mhalearn audit tests/layer.safetensors port:attention --report audit.html
      - uses: actions/upload-artifact@v4
        if: failure()
        with: {path: audit.html}
```

## How it works, and what to trust

1. **What a right box leaves** is measured: the claimed layer is computed with every step rounded
   to the box's format, as its labels show it. A box within that is `ok` at that precision, unless
   step 4 finds something.
2. **Every change of the catalogue is tried** on a few sequences, its number, where it has one,
   fitted. Outputs are a sum over heads, so one Gram matrix tells which heads have a change.
3. **Pairs, and a third change to the best of them,** where one does not bring the error down to
   rounding (`depth`, three unless said otherwise, and `max_seconds`).
4. **Below rounding** a change is believed where the residual has slope one along it, on either
   half of the sequences, and by more than the best of so many changes has by chance; rounding has
   slope zero along any. It takes eight sequences and 1,500 numbers.
5. **Two explanations** are compared along the step between them. Where they cannot be told apart,
   both are named, each says so, and they share their likelihood.
6. **What no change explains** is called `unexplained`, with the rows and sequences it lies in; with
   the heads, where output projections tell them apart; with the keys, or the distances between a
   row and its keys, where a few of them explain most of it. A fault is named beside it only where
   it takes off nine tenths of the squared error, and is then never more likely than not.
7. **Then the layer is learned,** in the seconds that are left, where it has at most 4,000 unknowns
   and examples are twice the counting limit: from the claim downhill, certified on a fourth of the
   examples, and compared with the claim head by head.
8. **Confidence** is how often findings of a kind were right, measured below.

Not done: what lies outside attention (norms before it); blocks; int8 steps that
depend on a whole batch, or were calibrated before. Errors are relative root-mean-square errors.
"""

KINDS = {
    "alone": "it explains all by itself",
    "of two": "two explain all",
    "of three": "three do",
    "hidden": "rounding would have hidden it",
    "part": "it explains a part",
    "unexplained": "nothing explains a rest, which is outside the catalogue",
}

CATALOGUE = """
## The catalogue

| fault | of | what the box does | seen in |
|---|---|---|---|
"""


def main() -> None:
    runs = json.loads((RESULTS / "audit.json").read_text())["runs"]
    text = TUTORIAL + _figures(runs) + CATALOGUE
    for fault in FAULTS:
        seen = ", ".join(map(_link, fault.seen)) or "none on record"
        text += f"| `{fault.name}` | {fault.family} | {fault.words} | {seen} |\n"
    OUT.write_text(text)


def _link(issue: str) -> str:
    place, number = issue.split("#")
    return f"[{issue}](https://github.com/{place}/issues/{number})"


def _made(runs: list[Record], study: str) -> list[Record]:
    return [one for one in runs if one["study"] == study and "findings" in one]


def _figures(runs: list[Record]) -> str:
    single, pairs, mixed = (_made(runs, study) for study in ("single", "pairs", "mixed"))
    clean, outside = _made(runs, "clean"), _made(runs, "outside")
    text = "\n## What was measured\n\n" + _design(runs, single)
    text += "| | cases | as it should be | share |\n|---|---|---|---|\n"
    for precision, tokens in product(("float32", "bfloat16"), ("random", "recorded")):
        some = [one for one in single if (one["precision"], one["tokens"]) == (precision, tokens)]
        text += _row(
            f"one fault, {precision}, {tokens} tokens: named first, with its head", some, _named
        )
    for kind, names in (("drawn", False), ("trained", True)):
        some = [one for one in single if one["layer"].startswith("trained") == names]
        text += _row(f"of these, in {kind} layers", some, _named)
    for precision in ("float32", "bfloat16"):
        some = [one for one in pairs if one["precision"] == precision]
        text += _row(f"two faults, {precision}: both named", some, _named)
    for precision in ("float32", "bfloat16"):
        some = [one for one in clean if one["precision"] == precision]
        text += _row(f"right boxes, {precision}: ok", some, lambda one: one["ok"])
    count = len({one["fault"] for one in outside})
    text += _row(f"{count} faults outside the catalogue: not misnamed", outside, _humble)
    text += _row("the same: at the right place", outside, lambda one: one["right_locus"])
    text += _row("one of them beside one of the catalogue: this one named", mixed, _named)
    text += "\n" + _missed(single, pairs, clean, outside)
    text += _large(_made(runs, "large"))
    return text + _calibration(runs)


def _design(runs: list[Record], single: list[Record]) -> str:
    faults, names = {fault.name for fault in FAULTS}, {fault.name for fault in PLANTED}
    asked = [one for one in runs if one["study"] == "single"]
    skipped = Counter(one["skipped"] for one in asked if "skipped" in one)
    every = len(NAMES) * len(PLANTED) * 4
    left_out = "; ".join(f"{count}: {why}" for why, count in skipped.most_common())
    return (
        f"`benchmarks/audit.py`: {len(NAMES)} layers. Six are drawn, of {DRAWN} features "
        "(Llama-like with YaRN, gpt-oss-, Gemma-, T5- and DeepSeek-like, and an encoder with "
        "ALiBi), two are trained, the second of a small transformer's (64 features, 4 heads) and "
        "one of a decoder's (96 features, 6 heads, 2 key heads). Tokens are drawn, "
        f"{SEQUENCES} sequences of {TOKENS}, or recorded from text, of 16 tokens and more. Boxes "
        "are in NumPy and share no code with the package; "
        f"{len(faults & names)} of the {len(faults)} faults of the catalogue are planted, in "
        f"{len(PLANTED)} ways. A fault that changes outputs by less than half of what the box "
        "rounds is not counted, nor are two that both change the scale, which are one.\n\n"
        f"{len(asked)} of all {every} combinations of fault, layer, precision and kind of token "
        "were run, in an order in which each fault meets each layer first in one precision on "
        f"random tokens and in the other on recorded ones. Not counted: {left_out}. "
        f"{sum('crashed' in one for one in runs)} runs crashed.\n\n"
    )


def _calibration(runs: list[Record]) -> str:
    """How often findings of each kind are right, on boxes that the shares were not fitted to."""
    fitted, others = fitted_shares(runs), halves(runs)[1]
    _draw(others)
    text = (
        "\n### Confidence\n\nEvery second box of each study fits how often findings of a kind are "
        "right, the others show it. Findings that would explain a box as well share a likelihood; "
        "beside something unexplained, none is given more than one half.\n\n"
        "| what stands behind a finding | findings to fit | share right | others | share right |\n"
        "|---|---|---|---|---|\n"
    )
    for kind, words in KINDS.items():
        if kind not in fitted:
            continue
        share, cases = fitted[kind]
        made = [one for one in others if one.kind == kind]
        weight = sum(1 / (1 + one.rivals) for one in made)
        right = sum(one.right for one in made)
        seen = f"{right / weight:.2f}" if weight else "-"
        text += f"| {words} | {cases} | {share:.2f} | {weight:.0f} | {seen} |\n"
    return text + (
        "\n![How often findings of a confidence are right](images/audit_reliability.svg)\n\n"
        "Findings of the other half, by the confidence they are given; numbers of them beside.\n"
    )


def _row(what: str, made: list[Record], good: Any) -> str:
    right = sum(bool(good(one)) for one in made)
    share = f"{right / len(made):.1%}" if made else "-"
    return f"| {what} | {len(made)} | {right} | {share} |\n"


def _named(one: Record) -> bool:
    return bool(one.get("named"))


def _humble(one: Record) -> bool:
    return not any(f["name"] != "unexplained" and f["confidence"] > 0.5 for f in one["findings"])


def _missed(*studies: list[Record]) -> str:
    """Each case that is not as it should be."""
    text = ""
    for one in (one for made in studies for one in made):
        good = {"clean": one["ok"], "outside": _humble(one) and one.get("right_locus")}
        if good.get(one["study"], _named(one)):
            continue
        what = one.get("fault") or " and ".join(one.get("faults", ())) or "nothing"
        said = [f["name"] for f in one["findings"]] or ["ok"]
        place = f"{one['layer']}, {one['precision']}, {one['tokens']} tokens"
        text += f"| {what} | {place} | {', '.join(said)} |\n"
    return f"Those that are not:\n\n| planted | in | said |\n|---|---|---|\n{text}" if text else ""


def _large(made: list[Record]) -> str:
    if not made:
        return ""
    text = (
        "\nA layer of 576 features, 9 heads and 3 key heads, 256 sequences of 64 tokens, on a "
        "machine that others used too:\n\n"
        "| planted | said | seconds | of the processor |\n|---|---|---|---|\n"
    )
    for one in made:
        said = ", ".join(f["name"] for f in one["findings"]) or "ok"
        text += f"| {one['fault']} | {said} | {one['seconds']:.0f} | {one['cpu_seconds']:.0f} |\n"
    return text


def _draw(others: list[Said]) -> None:
    bins: dict[float, list[bool]] = {}
    for said in others:
        bins.setdefault(round(confidence(said.kind, said.rivals), 2), []).append(said.right)
    with picture("audit_reliability.svg", 4.2, 3.2) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for sure, rights in sorted(bins.items()):
            share = sum(rights) / len(rights)
            axes.plot(sure, share, "o", color="#1f6fc4")
            axes.annotate(f" {len(rights)}", (sure, share), fontsize=8)
        axes.set(xlabel="confidence", ylabel="share that is right", xlim=(0, 1.08), ylim=(0, 1.08))


if __name__ == "__main__":
    main()
