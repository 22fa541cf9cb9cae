"""The controller core: a state machine that decides what a run does next."""
