"""`python -m oneshot.evaluate`: the same as `oneshot evaluate`."""
