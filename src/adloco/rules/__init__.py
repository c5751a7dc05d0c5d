"""Decisions as pure functions of plain numbers. Nothing in here imports torch."""
