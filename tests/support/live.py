"""Memory of models' tensors."""


def storages_of(chunks):
    """Bytes of the storages of these chunks' weights, each storage counted once."""
    tensors = (parameter.untyped_storage() for chunk in chunks for parameter in chunk.parameters())
    return sum({storage._cdata: storage.nbytes() for storage in tensors}.values())
