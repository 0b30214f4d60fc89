"""A folder of checkpoints, as far as flags look into it."""

from megatron_rc.launch.checkpoint_folders import TRACKER, iteration_folder


def outline_of_checkpoint(folder, step=3):
    """Make the names of a checkpoint in this folder, without weights; returns the folder."""
    checkpoint = iteration_folder(folder, step)
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    (folder / TRACKER).write_text(str(step))
    return folder
