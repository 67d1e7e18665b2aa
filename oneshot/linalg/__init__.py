"""Dense linear algebra on tensors only: no models, no files, no configuration."""
