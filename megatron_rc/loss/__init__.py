"""Policy objectives, their aggregation and what is measured of them.

``docs/design.md`` begins with the words and symbols that all modules use.
"""
