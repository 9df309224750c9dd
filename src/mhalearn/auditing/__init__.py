"""Which attention does this box really compute? Faults of ports, named.

`mhalearn.audit` is its front door; see `auditing.audit`.
"""
