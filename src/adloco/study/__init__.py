"""Many runs: which are missing, their training, and what their comparison says."""
