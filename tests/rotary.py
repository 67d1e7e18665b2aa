"""Rotary positions of tiny models; the module imports nothing, so that tables of the documents may read it."""

LLAMA3_ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
