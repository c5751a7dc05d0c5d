"""Prediction of what a run costs on given links, from measurements of other runs."""
