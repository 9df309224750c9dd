"""A box that can be asked: which sequences to ask for, and a layer from the answers by algebra.

One file an idea: `session` keeps count of what was asked and keeps the answers; `forms` makes one
kind of box of many; `domain` knows which tokens may be asked; `plane` finds the heads from tokens
in a plane; `extension` extends them to all features, a linear problem; `algebra` is their order.
Heads that write alike are told apart where they turn: `sweep`, `pursuit`, `turns`, and `by_turns`.
"""
