"""Jobs for schedulers, and what is checked before a long run."""
