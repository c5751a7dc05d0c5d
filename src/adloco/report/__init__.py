"""What a person sees of a finished run: plots and report.html."""
