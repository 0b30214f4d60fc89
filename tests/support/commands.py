"""A command's main function, called in this process."""


def code_of(main, *words):
    """The exit code of a main function with these words."""
    try:
        main([str(word) for word in words])
    except SystemExit as end:
        return end.code
    return 0
