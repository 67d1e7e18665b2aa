"""`oneshot.compress`, `predict`, `profile` and `evaluate`: Python's functions, on names or on objects in memory."""
