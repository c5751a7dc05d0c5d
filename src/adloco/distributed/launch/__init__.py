"""From one command to ranks: process groups, starting ranks on this machine, failures."""
