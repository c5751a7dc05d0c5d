"""Recipes shipped with the package: `adloco train NAME`."""
