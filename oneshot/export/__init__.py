"""Export tiers: what a compressed model is written as."""
