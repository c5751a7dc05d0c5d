"""Models by name. They are built without memory and filled part by part."""
