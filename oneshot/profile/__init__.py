"""`python -m oneshot.profile`: the same as `oneshot profile`. The function of this name stays in the package."""
