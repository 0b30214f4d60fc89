"""Comparison of the tensors in a Hugging Face directory with the tensors that a model reads from it."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.families import family_of
from megatron_rc.launch.weights.load import WeightFiles, open_weights
from megatron_rc.launch.weights.megatron_bridge import is_bridged
from megatron_rc.launch.weights.units import names_of, units_of
from megatron_rc.parallel.groups import ParallelGroups, group_rank

# Tensors that models compute anew: Llama's rotary frequencies and GPT-2's causal masks in older files.
_COMPUTED = re.compile(r"(.+\.)?(rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias)")
_LAYER = re.compile(r"(?:.+\.)?(?:layers|h)\.(\d+)\..+")
_MOST_NAMES = 3
_log = logging.getLogger("megatron_rc")


def check_contents(
    folder: str | Path, flag: str, config: RunConfig, groups: ParallelGroups, *, has_output_layer: bool = True
) -> None:
    """Check the output layer of a directory, and log its tensors that are not read.

    The first rank alone does so: it may read two whole matrices. The others return at once.

    Args:
        folder: the Hugging Face directory.
        flag: the flag that gave it.
        config: settings of the model that reads it.
        groups: this rank's groups.
        has_output_layer: whether the model has one; a critic has a value head instead.

    Raises:
        ValueError: the files cannot be opened, the output layer is missing, or it contradicts tied embeddings.
    """
    if is_bridged(config):  # loading compares the names with those that Megatron-Bridge reads
        return
    if not groups.is_first_of_replica or group_rank(groups.dp) != 0:
        return
    with open_weights(folder) as files:
        if has_output_layer:
            _check_output_layer(files, config)
        _log_unread(files, flag, config)


def _check_output_layer(files: WeightFiles, config: RunConfig) -> None:
    """Raise ValueError if an untied output layer is missing, or a tied model has another one than its embeddings."""
    family = family_of(config)
    ((output,),) = (rule.hugging_face for rule in family.untied_head)
    (embeddings,) = family.embedding[0].hugging_face
    is_tied = not config.model.untie_embeddings_and_output_weights
    if not is_tied and files.find(output) is None:
        raise ValueError(
            f"{files.folder} holds no {output}, and config.json does not tie the output layer to the embeddings: set "
            "tie_word_embeddings to true there if both have the same weights, or add the file with the tensor"
        )
    if is_tied and files.find(output) is not None and files.find(embeddings) is not None:
        difference = files.largest_difference(output, embeddings)
        if difference is not None:
            raise ValueError(
                f"{files.folder}: config.json ties the output layer to the embeddings, but {output} differs from "
                f"{embeddings} ({difference}): set tie_word_embeddings to false in config.json to keep both, or "
                f"remove {output} from the files"
            )


def _log_unread(files: WeightFiles, flag: str, config: RunConfig) -> None:
    """Log one line about the tensors that no rule reads, if there are any."""
    names = names_of(units_of(config))
    for rule in family_of(config).untied_head:
        # A tied model reads no output layer; a stored one was compared with the embeddings.
        names.update(rule.hugging_face)
    read = {stored for name in names for stored in files.stored_names(name)}
    unread = [name for name in files.names if name not in read and not _COMPUTED.fullmatch(name)]

    num_layers = config.transformer.num_layers
    further_layers = [name for name in unread if _layer_of(name) >= num_layers]
    unknown = sorted(set(unread).difference(further_layers))
    kinds = []
    if unknown:
        kinds.append(f"{len(unknown)} that this model does not have ({_listed(unknown)})")
    if further_layers:
        kinds.append(
            f"{len(further_layers)} of the layers from {num_layers} on, which num_hidden_layers does not count"
        )
    if kinds:
        _log.warning("%s %s: tensors of the files that are not read: %s", flag, files.folder, "; ".join(kinds))


def _layer_of(name: str) -> int:
    """Number of the layer that a tensor belongs to; -1 if it belongs to none."""
    matched = _LAYER.fullmatch(name)
    return -1 if matched is None else int(matched[1])


def _listed(names: Collection[str]) -> str:
    """The first names, and how many follow."""
    shown = list(names)[:_MOST_NAMES]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")
