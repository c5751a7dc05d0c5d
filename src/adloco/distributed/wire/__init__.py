"""Wire formats: blocks of float32 values to bytes and back."""
