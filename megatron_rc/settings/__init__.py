"""The correction's settings: the config, its criteria and presets, its flags, and other programs' settings.

``docs/design.md`` begins with the words and symbols that are used here.
"""
