"""Models by name, built without memory and filled part by part."""
