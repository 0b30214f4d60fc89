"""Launch files and presets (YAML), brought along with the package."""
