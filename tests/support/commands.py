"""A command's main function, called in this process."""


def code_of(main, *arguments):
    """The exit code of a main function with these words."""
    try:
        main([str(word) for word in arguments])
    except SystemExit as end:
        return end.code
    return 0
