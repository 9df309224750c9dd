"""What people would use instead of the exact solver, done fairly: Adam, L-BFGS, linear attention.

Each of `adam`, `lbfgs` and `linear` has one learner, `learn`. What they share is beside them: the
`student` and its loss, the `descent` of one start, and the `starts` among which examples that were
held out choose.
"""
