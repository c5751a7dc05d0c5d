"""Sources of models: the settings of each in a file. No torch is imported."""
