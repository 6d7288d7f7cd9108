"""Whether chunks make up a tensor, without overlap or hole, and the checksums of their blocks."""

import itertools
import random
import time
import zlib

import torch

from parallel3d.checkpoint.format.files import BLOCK, bytes_of, crc32, crcs_of
from parallel3d.checkpoint.pieces import tile

Box = tuple[tuple[int, ...], tuple[int, ...]]


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    held: dict[tuple[int, ...], int] = {}
    for offsets, sizes in boxes:
        for at in itertools.product(
            *(range(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        ):
            held[at] = held.get(at, 0) + 1
    return all(held.get(at, 0) == 1 for at in itertools.product(*map(range, shape)))


def cut_up(shape: tuple[int, ...], generator: random.Random) -> list[Box]:
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(generator.randint(0, 5) if shape else 0):
        offsets, sizes = boxes.pop(generator.randrange(len(boxes)))
        d = generator.randrange(len(shape))
        first = generator.randint(0, sizes[d])
        for begin, size in ((0, first), (first, sizes[d] - first)):
            start = (*offsets[:d], offsets[d] + begin, *offsets[d + 1 :])
            boxes.append((start, (*sizes[:d], size, *sizes[d + 1 :])))
    return boxes


def test_against_counting() -> None:
    generator = random.Random(0)
    right = 0
    for _ in range(3000):
        shape = tuple(generator.randint(0, 4) for _ in range(generator.randint(0, 3)))
        boxes = cut_up(shape, generator)
        if shape and generator.random() < 0.5:  # moves one
            number, d = generator.randrange(len(boxes)), generator.randrange(len(shape))
            offsets, sizes = boxes[number]
            start = generator.randint(0, shape[d] - sizes[d])
            boxes[number] = (*offsets[:d], start, *offsets[d + 1 :]), sizes
        if generator.random() < 0.1:
            boxes.append(generator.choice(boxes))
        boxes = [box for box in boxes if all(box[1])]
        want = counted(shape, boxes)
        right += want
        assert tile(shape, boxes) == want, (shape, boxes)
    assert 1000 < right < 2900


def test_many_are_quick() -> None:
    """No comparison by pairs: 40,000 boxes in two columns, as bricks, with no straight cut."""
    rows = 40_000
    left = [((row, 0), (2, 1)) for row in range(0, rows, 2)]
    right = [((row, 1), (2, 1)) for row in range(1, rows - 1, 2)]
    ends = [((0, 1), (1, 1)), ((rows - 1, 1), (1, 1))]
    began = time.process_time()
    assert tile((rows, 2), [*left, *right, *ends]) and not tile((rows, 2), [*left, *right])
    assert time.process_time() - began < 10


def test_crc32() -> None:
    assert crc32(b"123456789") == 0xCBF43926  # the check value of CRC-32/ISO-HDLC
    assert crc32(b"6789", crc32(b"12345")) == 0xCBF43926


def test_one_for_each_block() -> None:
    values = torch.arange(BLOCK // 8 + 5)
    data = bytes_of(values)
    assert crcs_of(data) == [zlib.crc32(data[:BLOCK]), zlib.crc32(data[BLOCK:])]
    assert crcs_of(bytes_of(torch.empty(0))) == []
