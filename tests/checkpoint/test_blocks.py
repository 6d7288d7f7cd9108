"""Checksums are CRC-32 whatever library makes them."""

import zlib

import torch

from parallel3d.checkpoint.format.files import BLOCK, bytes_of, crc32, crcs_of


def test_crc32() -> None:
    assert crc32(b"123456789") == 0xCBF43926  # the check value of CRC-32/ISO-HDLC
    assert crc32(b"6789", crc32(b"12345")) == 0xCBF43926


def test_one_for_each_block() -> None:
    values = torch.arange(BLOCK // 8 + 5)
    data = bytes_of(values)
    assert crcs_of(data) == [zlib.crc32(data[:BLOCK]), zlib.crc32(data[BLOCK:])]
    assert crcs_of(bytes_of(torch.empty(0))) == []
