"""The correction inside other trainers: a module for each program, with functions that take the program's arguments.

No module imports the program that it is for; each needs torch alone. ``docs/adaptors.md`` has a page for each program.
"""
