"""Inner steps, outer step, merge, rounds: the methods, over any placement."""
