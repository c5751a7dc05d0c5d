"""The configuration file of the AdLoCo authors' script, and recipes made from it."""
