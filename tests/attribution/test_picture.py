"""The picture of an attribution: a column for each layer, a row for each kind, the shares as colours."""

import pytest
from matplotlib.figure import Figure

from megatron_rc.attribution import Attribution
from megatron_rc.attribution.picture import draw, write_picture

RESULT = Attribution(
    {
        "model.embed_tokens.weight": 1.0,
        "model.layers.0.self_attn.q_proj.weight": 2.0,
        "model.layers.0.self_attn.k_proj.weight": 2.0,
        "model.layers.1.mlp.up_proj.weight": -1.0,
        "model.norm.weight": 0.0,
    },
    measured=8.0,
)


def test_shares_are_drawn_by_layer_and_kind():
    axes = Figure().subplots()
    draw(RESULT, axes)
    (image,) = axes.get_images()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["outside", "0", "1"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["embedding", "attention", "mlp", "norms"]
    assert image.get_array().tolist() == [[0.125, 0, 0], [0, 0.5, 0], [0, 0, -0.125], [0, 0, 0]]
    assert image.get_clim() == (-0.5, 0.5)
    assert "50%" in axes.get_title()


NOTHING = Attribution({"model.norm.weight": 0.0}, measured=0.0)


@pytest.mark.parametrize("result", [RESULT, NOTHING], ids=["parts", "nothing"])
def test_a_file_is_written(tmp_path, result):
    write_picture(result, tmp_path / "attribution.png")
    assert (tmp_path / "attribution.png").read_bytes().startswith(b"\x89PNG")
