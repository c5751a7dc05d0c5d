"""From text to numbered samples in numbered streams."""
