"""shard_batch: what each rank gets of a batch of whole sequences; gather: the way back."""

import pytest
import torch

import parallel3d as p3d
from parallel3d import MeshLayout
from parallel3d.cp.batch import batch_of
from parallel3d.errors import MeshError, Parallel3dError, StateError
from parallel3d.testing import local_world

cut, gather = p3d.cp.shard_batch, p3d.cp.gather


def same(world, tensor):
    """``tensor`` on all ranks, where it was made outside."""
    return world.map(lambda _: tensor) if type(tensor) is torch.Tensor else tensor


def whole(length: int, rows: int = 2) -> torch.Tensor:
    return torch.arange(rows * length).view(rows, length) + 10


def test_without_cp_the_batch_stays() -> None:
    with local_world(2):
        mesh = p3d.build_mesh(MeshLayout(shard=2), device_type="cpu")
        for batch in (whole(5), (whole(5), whole(5)), {"input_ids": whole(5), "other": whole(3)}):
            if isinstance(batch, dict):
                batch.pop("other")
            made = cut(batch, mesh)
            assert made is batch or made == batch
        assert gather(batch["input_ids"], mesh, like=None) is batch["input_ids"]
        # Lengths of documents become positions, which is how transformers' models take them.
        made = cut({"input_ids": whole(5), "seq_lens": [2, 3]}, mesh)
        assert list(made) == ["input_ids", "position_ids"]
        assert made["position_ids"].tolist() == [[0, 1, 0, 1, 2]] * 2


def test_a_tensor_in_both_orders(world) -> None:
    ids = same(world, whole(8))
    first, second = world.per_rank(cut(ids, world.mesh))
    assert first[0].tolist() == [10, 11, 16, 17]
    assert second[0].tolist() == [12, 13, 14, 15]
    first, second = world.per_rank(cut(ids, world.mesh, balanced=False))
    assert first[0].tolist() == [10, 11, 12, 13]
    assert second[0].tolist() == [14, 15, 16, 17]


def test_a_dict_of_transformers_names(world) -> None:
    ids = same(world, whole(7))
    made = cut({"input_ids": ids, "labels": ids, "use_cache": False}, world.mesh)
    by_rank = {k: world.per_rank(v) for k, v in made.items() if k != "use_cache"}
    assert made["use_cache"] is False
    assert by_rank["input_ids"][0][0].tolist() == [10, 11, 16, 0]
    assert by_rank["input_ids"][1][0].tolist() == [12, 13, 14, 15]
    assert by_rank["position_ids"][0][0].tolist() == [0, 1, 6, 0]
    assert by_rank["position_ids"][1][0].tolist() == [2, 3, 4, 5]
    # Labels are shifted first: the last token of a rank's chunk has the next rank's first as label.
    assert by_rank["shift_labels"][0][0].tolist() == [11, 12, -100, -100]
    assert by_rank["shift_labels"][1][0].tolist() == [13, 14, 15, 16]
    assert by_rank["labels"][0][0].tolist() == [10, 11, 16, -100]
    # 2 x 6 labels in all: half of them, and the average over two ranks of the sums is the mean.
    assert [float(n) for n in by_rank["num_items_in_batch"]] == [6.0, 6.0]
    assert all(bool(mask.all()) for mask in by_rank["attention_mask"])
    assert batch_of(made).key_mask is None
    assert batch_of(made).sequence.documents is None


def test_labels_of_other_models(world) -> None:
    ids = same(world, whole(8))
    made = cut({"input_ids": ids, "labels": ids}, world.mesh, shift=False)
    assert "shift_labels" not in made
    assert [float(n) for n in world.per_rank(made["num_items_in_batch"])] == [8.0, 8.0]
    made = cut({"input_ids": ids, "labels": ids, "num_items_in_batch": 30}, world.mesh)
    assert made["num_items_in_batch"] == 15.0


def test_padding_is_for_attention_alone(world) -> None:
    ids, mask = same(world, whole(7)), torch.ones(2, 7, dtype=torch.int64)
    mask[0, 5:] = 0
    made = cut({"input_ids": ids, "attention_mask": same(world, mask)}, world.mesh)
    assert all(bool(m.all()) for m in world.per_rank(made["attention_mask"]))
    first, second = world.per_rank(batch_of(made).key_mask)
    assert first.tolist() == [[True, True, False, False], [True, True, True, False]]
    assert second.tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize(
    "how",
    [
        {"seq_lens": [3, 1, 3]},
        {"seq_lens": torch.tensor([0, 3, 4, 7])},
        {"cu_seqlens": torch.tensor([0, 3, 4, 7])},
        {"cu_seq_lens_q": torch.tensor([0, 3, 4, 7]), "max_length_q": 3},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 0, 1, 2]])},
        {"seq_lens": [3, 1]},
    ],
    ids=str,
)
def test_documents(world, how) -> None:
    """However they are given; what is left is one more, and padding one of its own."""
    ids = same(world, whole(7, rows=1))
    how = {
        k: same(world, v) if isinstance(v, torch.Tensor) and k == "position_ids" else v
        for k, v in how.items()
    }
    made = cut({"input_ids": ids, **how}, world.mesh)
    assert set(made) == {"input_ids", "position_ids", "attention_mask"}
    documents = batch_of(made).sequence.documents
    numbers = world.per_rank(documents)[0][0]
    assert (numbers[1:] != numbers[:-1]).int().tolist() == [0, 0, 1, 1, 0, 0, 1]
    first, second = world.per_rank(made["position_ids"])
    assert first[0].tolist() == [0, 1, 2, 0]
    assert second[0].tolist() == [2, 0, 0, 1]


def test_positions_with_a_mask_are_no_documents(world) -> None:
    """As in transformers: positions of rows with padding on the left begin late."""
    ids = same(world, whole(8))
    positions = same(world, torch.tensor([[1, 1, 0, 1, 2, 3, 4, 5]] * 2))
    mask = same(world, torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]] * 2))
    made = cut({"input_ids": ids, "position_ids": positions, "attention_mask": mask}, world.mesh)
    assert batch_of(made).sequence.documents is None


def test_dims_and_pad(world) -> None:
    features = same(world, torch.ones(2, 3, 8))
    made = cut((features,), world.mesh, dims=2)
    assert made[0].shape == (2, 3, 4)
    made = cut(
        {"input_ids": same(world, whole(8)), "extra": features}, world.mesh, dims={"extra": 2}
    )
    assert made["extra"].shape == (2, 3, 4)
    made = cut(
        {"input_ids": same(world, whole(8)), "extra": features}, world.mesh, dims={"extra": None}
    )
    assert made["extra"] is features
    ids = same(world, whole(7))
    made = cut([ids, ids], world.mesh, pad=(0, -100))
    assert isinstance(made, list)
    assert [world.per_rank(x)[0][0, -1].item() for x in made] == [0, -100]
    with pytest.raises(Parallel3dError, match=r"length 7 is not divisible by 4.*pad=\(0, -100\)"):
        cut((ids, ids), world.mesh)
    with pytest.raises(Parallel3dError, match=r"which dim of 'extra', of shape .*say it: dims="):
        cut({"input_ids": ids, "extra": features}, world.mesh)
    with pytest.raises(Parallel3dError, match="'extra' has 3 dims, and no dim 5"):
        cut({"input_ids": ids, "extra": features}, world.mesh, dims={"extra": 5})
    with pytest.raises(Parallel3dError, match=r"other lengths: .*'labels': 8"):
        cut({"input_ids": ids, "labels": same(world, whole(8))}, world.mesh)


def test_other_mistakes(world) -> None:
    ids = same(world, whole(7))
    with pytest.raises(MeshError, match="it must be a DeviceMesh"):
        cut(ids, None)
    with pytest.raises(Parallel3dError, match="batch is str; shard_batch takes a dict"):
        cut("ids", world.mesh)
    with pytest.raises(Parallel3dError, match="add up to 9; the sequence has 7 tokens"):
        cut({"input_ids": ids, "seq_lens": [4, 5]}, world.mesh)
    with pytest.raises(Parallel3dError, match=r"must be that of padding, \(batch, length\)"):
        square = same(world, torch.ones(2, 1, 7, 7))
        cut({"input_ids": ids, "attention_mask": square}, world.mesh, dims={"attention_mask": None})
    with pytest.raises(Parallel3dError, match="no tensor of the batch has a sequence"):
        cut({"use_cache": True}, world.mesh)
    with pytest.raises(Parallel3dError, match=r"integers, \(batch, length\) = \(2, 7\)"):
        cut({"input_ids": ids}, world.mesh, documents=torch.zeros(2, 3).long())
    made, other = cut({"input_ids": ids}, world.mesh), cut({"input_ids": ids}, world.mesh)
    with pytest.raises(StateError, match="parts of several batches"):
        batch_of((made, other))
    with pytest.raises(StateError, match=r"`like` must be what p3d\.cp\.shard_batch has returned"):
        gather(ids, world.mesh, like=ids)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather(world, dim) -> None:
    x = torch.arange(42.0).view(2, 3, 7).movedim(2, dim).contiguous()
    batch = cut((same(world, x),), world.mesh, dims=dim, pad=0)
    joined = gather(batch[0], world.mesh, like=batch, dim=dim)
    assert [t.tolist() for t in world.per_rank(joined)] == [t.tolist() for t in world.per_rank(x)]
    tokens = cut((same(world, whole(7)),), world.mesh, pad=0)
    joined = gather(tokens[0] * 2, world.mesh, like=tokens)
    assert world.per_rank(joined)[0][1].tolist() == [2 * n for n in range(17, 24)]


def test_other_samples_on_a_rank_of_cp() -> None:
    """(1, 2, 2): the cp groups are ranks 0, 1 and 2, 3; rank 3 reads another token."""
    with local_world(4) as world:

        def of(rank: int, odd: int | None) -> torch.Tensor:
            tokens = whole(8) + 100 * (rank // 2)
            if rank == odd:
                tokens[1, 5] = 7
            return tokens

        right = world.map(lambda rank: of(rank, None))
        wrong = world.map(lambda rank: of(rank, 3))
        said = (
            r"rank 3 has another batch than rank 2, the first of its cp group: input 'input_ids', "
            r"element \[1, 5\] is 7 on rank 3 and 123 on rank 2"
        )

        def mesh() -> object:
            return p3d.build_mesh(MeshLayout(1, 2, cp=2), device_type="cpu")

        with pytest.raises(p3d.AgreementError, match=said):
            cut({"input_ids": wrong}, mesh())
        with pytest.raises(
            p3d.AgreementError, match="the size of dim 1 of input '0' is 9 on rank 1"
        ):
            cut(world.map(lambda rank: whole(8 + (rank == 1))), mesh())
        cut({"input_ids": wrong}, mesh(), check_same_batch=False)
        checked = mesh()
        cut({"input_ids": right}, checked)
        with p3d.testing.record_collectives() as recorded:
            cut({"input_ids": right}, checked)  # the first batch only
        assert recorded.calls == []
