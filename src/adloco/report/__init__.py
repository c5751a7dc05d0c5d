"""The pages of runs, comparisons and plans, and their pictures."""
