"""A word of explanation for every stage and every phase, said in one place."""

import re

# Of the first pattern that fits, the words: a stage may be named "round 2, hop 3, free".
_STAGES = (
    (r"^student$", "what came of it, on examples that were held out"),
    (r"^student", "Adam on a block of more heads and neurons than needed; a penalty on them fades"),
    (r"^candidate", "a short descent, which says whether this kind of block is worth more"),
    (r"turned over", "neurons that came out as mirror images are turned back, and descend again"),
    (
        r"gauss-newton.*(smaller|left out|round)",
        "leaves out what costs nothing, and descends again",
    ),
    (r"gauss-newton", "fewer heads and neurons, and Gauss-Newton on all of them at once"),
    (r"asking", "asks the box about sequences, for what is said here"),
    (r"heads found", "algebra on what was answered shows how many heads there are"),
    (r"sketch by algebra", "all W, and the rows and columns of Θ that the calls have told"),
    (r"narrow heads", "one descent a head, on what lies in the space that it writes to"),
    (r"w known", "attention alone, by Gauss-Newton: the calls have told all W"),
    (r"phase 1", "how inputs and labels correlate shows the sum of all projections W, roughly"),
    (r"phase [24].*certif", "looks for rows on which all heads attend alike"),
    (r"phase [24]", "cuts out a convex body around all Θ with the conditions of these rows"),
    (r"phase 3", "estimates the sum again, from rows on which one token is far ahead"),
    (r"phase 5", "finds the span of all Θ from the wide directions of the body"),
    (r"phase 6", "takes candidates for the heads from the span; held-out examples choose"),
    (r"theory", "the theorem, beside what this run uses"),
    (r"inputs", "recognises how the tokens are distributed"),
    (r"decoded", "finds every head's own attention pattern of every row"),
    (r"head count|heads tried", "how many heads there are: fits with more and fewer are compared"),
    (r"working set", "takes as many examples into memory as the descent needs"),
    (r"span", "goes over to coordinates of the space that the tokens fill"),
    (r"resumed", "goes on from a layer that was there"),
    (r"hop|exchange", "leaves a local minimum: starts trade heads and descend again"),
    (r"slide|first-order", "many short first-order steps, with a penalty that fades"),
    (r"release", "lets go of the ridge, a penalty on Θ and W, step by step"),
    (r"free|no ridge|no penalty|settle", "Gauss-Newton steps without any penalty"),
    (r"finish|direct", "last steps of the best start, solved directly"),
    (r"sketch|subsample", "the same search on a part of the examples first"),
    (r"round|attempt|search|descent", "random starts descend under a ridge on Θ and W that fades"),
    (r"choice|select|chosen", "examples that were held out choose among the starts"),
    (r"polish", "Gauss-Newton on all parameters at once, as far down as the labels allow"),
    (r"reduc|merg", "drops or merges heads that the examples do not need"),
    (r"refit", "under noise, the last fit to all examples"),
    (r"residual", "asks whether what is left depends on the inputs, or looks like noise"),
    (r"one more head|missing", "tries whether one more head would explain what is left"),
    (r"certif", "asks examples that were not fitted what can be said for certain"),
    (r"rank|identif|jacobian", "asks whether the examples determine every parameter"),
    (r"optimiser", "the optimiser that was given, from random starts"),
    (r"adam", "Adam on all parameters at once, from random starts"),
    (r"lbfgs|l-bfgs", "L-BFGS on all parameters at once, from random starts"),
    (r"linear", "fits linear attention and reads it as a softmax layer"),
    (r"warning", "something to know, though the run goes on"),
    (r"outcome", "the judge's word"),
)
_OTHER = "a step of the method"

# The paper's phases: what each is for, before it has found anything.
PHASES = (
    ("A crude sum", "The sum of all projections W, roughly, from correlations."),
    ("Certified rows", "Rows on which all heads attend alike; they cut out a convex body."),
    ("A better sum", "The body's proxy picks rows on which one token is far ahead."),
    ("A tighter body", "The same rows again with the better sum."),
    ("The span", "The body's wide directions should span every Θ."),
    ("The net", "Candidates from the span; held-out examples choose."),
)


def explain_stage(stage: str) -> str:
    """What a stage does, for readers who know the field; general words for one that is new."""
    name = stage.lower()
    return next((words for pattern, words in _STAGES if re.search(pattern, name)), _OTHER)


def find_phase(stage: str) -> int | None:
    """The number of the paper's phase that a stage belongs to."""
    found = re.match(r"phase ([1-6])\b", stage)
    return int(found[1]) if found else None
