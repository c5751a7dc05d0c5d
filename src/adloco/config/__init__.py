"""Recipes: their sections and settings, reading them from TOML and flags, and writing them."""
