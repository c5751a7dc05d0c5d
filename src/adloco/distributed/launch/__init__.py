"""Process groups, starting ranks on this machine, and failures of ranks."""
