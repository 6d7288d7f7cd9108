"""The table of operation kinds: names, sizes of products, what is written."""

import pytest
import torch
from torch import Tensor

from parallel3d._trace.kinds import bytes_of, kind_of, product_of, written_by


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("addmm", "product"),
        ("_grouped_mm", "product"),
        ("convolution_backward", "convolution"),
        ("native_layer_norm_backward", "norm"),
        ("_scaled_dot_product_flash_attention_backward", "attention"),
        ("_flash_attn_forward", "attention"),
        ("embedding", "lookup"),
        ("embedding_dense_backward", "other"),
        ("detach", "free"),
        ("mul", "other"),
    ],
)
def test_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def on_meta(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(shape, device="meta") for shape in shapes]


@pytest.mark.parametrize(
    ("name", "shapes", "sizes"),
    [
        ("mm", [(3, 4), (4, 5)], (3, 5, 4)),
        ("addmm", [(5,), (3, 4), (4, 5)], (3, 5, 4)),
        ("bmm", [(2, 3, 4), (2, 4, 5)], (6, 5, 4)),
        ("baddbmm", [(2, 3, 5), (2, 3, 4), (2, 4, 5)], (6, 5, 4)),
        ("linear", [(2, 3, 4), (5, 4), (5,)], (6, 5, 4)),
        ("_scaled_mm", [(3, 4), (4, 5), (), ()], (3, 5, 4)),
        ("_grouped_mm", [(6, 4), (2, 4, 5), (2,)], (6, 5, 4)),  # each row with one matrix
        ("_grouped_mm", [(4, 6), (6, 5), (2,)], (4, 5, 6)),  # its weights' gradient: parts of 6
        ("_grouped_mm", [(2, 3, 4), (4, 6), (2,)], (3, 6, 4)),  # each column with one matrix
    ],
)
def test_sizes_of_products(name: str, shapes: list[tuple[int, ...]], sizes: object) -> None:
    assert product_of(name, on_meta(*shapes))[2] == sizes


def test_an_expanded_dim_is_read_once() -> None:
    (x,) = on_meta((3, 1))
    assert bytes_of(x.expand(3, 8)) == bytes_of(x) == 12


def test_what_is_written() -> None:
    aten = torch.ops.aten
    x, y = on_meta((3,), (3,))
    assert written_by(aten.add.Tensor, (x, y), {}) == []
    (written,) = written_by(aten.add_.Tensor, (x, y), {})
    assert written is x
    (written,) = written_by(aten.add.out, (x, x), {"out": y})
    assert written is y
    lists = written_by(aten._foreach_add_.List, ([x, y], [y, y]), {})
    assert [id(t) for t in lists] == [id(x), id(y)]
    assert written_by(aten.add_.Tensor, (x, y), {}, but="self") == []
