"""Policy objectives, their aggregation and their measures.

``docs/design.md`` begins with the words and symbols that all modules use.
"""
