"""Decides which workers live in this process: all of them, or this rank's share."""
