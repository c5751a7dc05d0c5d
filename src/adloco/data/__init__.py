"""From text to samples: each sample is found by the number of a stream and a position in it."""
