"""What the user asks for: the config, its criteria and presets, its flags, and other programs' settings."""
