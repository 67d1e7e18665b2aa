"""`python -m oneshot.profile`: the same as `oneshot profile`. The function of this name is in `oneshot.pipeline`."""
