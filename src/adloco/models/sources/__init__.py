"""Where models come from: the settings of each source, in a file each. No torch is imported."""
