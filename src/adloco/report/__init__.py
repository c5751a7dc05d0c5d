"""The report of a run: plots and report.html."""
