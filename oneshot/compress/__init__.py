"""`python -m oneshot.compress`: the same as `oneshot compress`. The function of this name stays in the package."""
