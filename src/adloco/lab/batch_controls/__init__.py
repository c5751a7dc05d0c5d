"""Controls for the norm test: cyclic, random and replayed batches."""
