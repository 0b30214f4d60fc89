"""What the tensors of models hold."""


def storages_of(chunks):
    """Bytes of the storages below the weights of these chunks, each counted once."""
    tensors = (parameter.untyped_storage() for chunk in chunks for parameter in chunk.parameters())
    return sum({storage._cdata: storage.nbytes() for storage in tensors}.values())
