"""The report of a run: its records, the terminal, the page, the model card."""
