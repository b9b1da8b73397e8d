"""The host's part of launches: arithmetic against Triton's and PyTorch's own, and tables that layers share."""

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_sizes_are_tritons_own() -> None:
    import triton
    from palimpsa_kernels.triton import launches

    for x in [*range(1, 70), 127, 128, 129, 65535, 65537]:
        assert launches.next_power_of_2(x) == triton.next_power_of_2(x)
        assert [launches.cdiv(x, y) for y in (1, 7, 64)] == [triton.cdiv(x, y) for y in (1, 7, 64)]


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: torch.zeros(2, 5, 3, 4), True),
        (lambda: torch.zeros(1, 5, 8)[..., 2:6], True),
        (lambda: torch.zeros(2, 5, 8)[..., :4], True),
        (lambda: torch.zeros(2, 6, 8)[:, :5], False),
        (lambda: torch.zeros(1, 6, 8)[:, :5], True),
        (lambda: torch.zeros(1, 5, 8)[..., ::2], False),
        (lambda: torch.zeros(1, 5, 4, 3).mT, False),
        (lambda: torch.zeros(1, 5, 1, 8)[..., :4].transpose(2, 3), True),
        (lambda: torch.zeros(1, 0, 4, 3).mT, True),
    ],
)
def test_tokens_are_copied_only_where_they_do_not_lie_dense_behind_each_other(make, kept: bool) -> None:
    from palimpsa_kernels.triton.launches import tokens_adjacent

    x = make()
    adjacent = tokens_adjacent(x)
    assert (adjacent is x) == kept
    assert torch.equal(adjacent, x)
    if x.numel():
        assert adjacent[0, 0].is_contiguous()
        assert len(x) == 1 or adjacent.stride(0) == adjacent.shape[1] * adjacent.stride(1)


def test_layers_share_the_tables_of_one_tensor_of_offsets() -> None:
    from palimpsa_kernels.triton.chunks import make_chunks
    from palimpsa_kernels.triton.conv import make_places

    offsets = torch.tensor([0, 3, 9], dtype=torch.int32, device=DEVICE)
    first, places = make_chunks(1, 9, offsets, 4, offsets.device), make_places(1, 9, offsets, offsets.device)
    assert make_chunks(1, 9, offsets, 4, offsets.device) is first
    assert make_places(1, 9, offsets, offsets.device).place is places.place
    assert make_chunks(1, 9, offsets, 2, offsets.device) is not first
    assert make_chunks(1, 9, offsets, 4, offsets.device, goes_on=True).table[0, 3] != first.table[0, 3]
    assert make_chunks(1, 9, offsets.clone(), 4, offsets.device) is not first


def test_offsets_that_were_written_to_get_tables_of_their_own() -> None:
    from palimpsa_kernels.triton.chunks import make_chunks
    from palimpsa_kernels.triton.conv import make_places

    offsets = torch.tensor([0, 3, 9], dtype=torch.int32, device=DEVICE)
    make_chunks(1, 9, offsets, 4, offsets.device)
    make_places(1, 9, offsets, offsets.device)
    offsets.copy_(torch.tensor([0, 5, 8]))
    table = make_chunks(1, 9, offsets, 4, offsets.device).table
    assert table[:3, :2].tolist() == [[0, 4], [4, 5], [5, 8]]
    assert make_places(1, 9, offsets, offsets.device).place.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, -1]


def test_shared_tables_end_with_their_tensor() -> None:
    import weakref

    from palimpsa_kernels.triton.chunks import make_chunks
    from palimpsa_kernels.triton.conv import make_places

    offsets = torch.tensor([0, 3, 9], dtype=torch.int32, device=DEVICE)
    tables = weakref.ref(make_chunks(1, 9, offsets, 4, offsets.device).table)
    places = weakref.ref(make_places(1, 9, offsets, offsets.device).place)
    del offsets
    assert tables() is None
    assert places() is None
