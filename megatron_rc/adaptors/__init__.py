"""The correction inside other trainers: each module has what one program calls, with that program's arguments.

None of them imports the program that it is for, and each needs torch alone. ``docs/adaptors.md`` has a page for each,
``docs/design.md`` begins with the words and symbols that are used here.
"""
