"""What a run tells: its records, the terminal, the page, the model card."""
