"""`python -m oneshot.evaluate`: the same as `oneshot evaluate`. The function of this name stays in the package."""
