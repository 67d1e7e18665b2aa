"""The tables of the documents, made from the rows in `results/`."""
