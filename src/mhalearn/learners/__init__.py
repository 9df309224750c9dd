"""How layers are learned: each learner is an object of one protocol."""
