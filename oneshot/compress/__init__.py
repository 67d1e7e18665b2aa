"""`python -m oneshot.compress`: the same as `oneshot compress`. The function of this name is in `oneshot.pipeline`."""
